"""A client's whole round in one C call. The specification is the same round under autograd, in ``simulate``."""

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from fairfold.kernels.form import Form, Objective, Places, Samples
from fairfold.kernels.native.calls import changed, serving, settle
from fairfold.kernels.native.packed import REAL_BYTES

_OPTIMISERS = {"sgd": 0, "adagrad": 1, "adam": 2}
_long, _double, _pointer = ctypes.c_int64, ctypes.c_double, ctypes.c_void_p


class _Model(ctypes.Structure):
    _fields_ = (
        ("product", _long),
        ("user", _long),
        ("item", _long),
        ("layers", _long),
        ("units", _pointer),
        ("output", _long),
        ("rating", _long),
        ("regulariser", _double),
        ("optimiser", _long),
        ("rate", _double),
    )


class _Places(ctypes.Structure):
    _fields_ = (("positions", _pointer), ("signs", _pointer))


class _Client(ctypes.Structure):
    _fields_ = (
        ("values", _pointer),
        ("size", _long),
        ("pull", _pointer),
        ("items", _Places * 2),
        ("users", _Places * 2),
        ("dense", _Places),
        ("rows", _long),
        ("samples", _pointer),
        ("count", _long),
        ("width", _long),
        ("targets", _pointer),
        ("ends", _pointer),
        ("steps", _long),
    )


def train(
    form: Form,
    objective: Objective,
    values: Tensor,
    pull: Tensor | None,
    items: Sequence[Places],
    users: Sequence[Places],
    dense: Places,
    samples: Samples,
) -> bool:
    """Train ``values`` in place; False where C cannot serve.

    Args:
        form: Of the model.
        objective: Loss and optimiser.
        values: All that the client trains, side by side.
        pull: A weight a value that draws it to where it started, or None.
        items: Of the item tables the form has, in its order: [rows, columns] each.
        users: Of the user's vectors, likewise: [columns] each.
        dense: Of all dense tensors, one after another.
        samples: What is trained on.
    """
    floats = [tensor for tensor in (values, pull, samples.targets) if tensor is not None]
    loaded = serving(*floats, followed=False)
    if loaded is None or not values.is_contiguous():
        return False
    kept: list[Tensor] = []

    def address(tensor: Tensor | None, dtype: torch.dtype) -> int | None:
        if tensor is None:
            return None
        kept.append(tensor.to(dtype).contiguous())
        return kept[-1].data_ptr()

    def places(found: Places) -> _Places:
        return _Places(address(found.positions, torch.int32), address(found.signs, torch.int8))

    def both(found: Sequence[Places]) -> ctypes.Array[_Places]:
        branches, rest = (_Places * 2)(), list(found)
        for branch, present in enumerate((form.product > 0, bool(form.layers))):
            if present:
                branches[branch] = places(rest.pop(0))
        return branches

    units = (_long * len(form.layers))(*form.layers)
    model = _Model(
        form.product,
        form.user,
        form.item,
        len(form.layers),
        ctypes.addressof(units),
        form.output,
        objective.rating,
        objective.regulariser,
        _OPTIMISERS[objective.optimiser],
        objective.rate,
    )
    client = _Client(
        values.data_ptr(),
        values.numel(),
        address(pull, values.dtype),
        both(items),
        both(users),
        places(dense),
        len(items[0].positions),
        address(samples.rows, torch.int32),
        *samples.rows.shape,
        address(samples.targets, values.dtype),
        address(samples.ends, torch.int64),
        samples.ends.numel(),
    )
    code = loaded.fairfold_train(ctypes.byref(model), REAL_BYTES[values.dtype], ctypes.byref(client))
    done = settle(code)
    if done:
        changed(values)
    return done
