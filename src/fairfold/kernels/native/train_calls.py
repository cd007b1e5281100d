"""A client's whole round in one C call; the specification is ``backends/stepped.py``."""

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from fairfold.kernels.form import Form, Objective, Places, Samples
from fairfold.kernels.native.calls import NotServed, changed, serving, settle
from fairfold.kernels.native.packed import REAL_BYTES

_OPTIMISERS = {"sgd": 0, "adagrad": 1, "adam": 2}
_pack_model = struct.Struct("qqqqPqqdqd").pack  # fairfold_model
_pack_client = struct.Struct("PqP4P4P2PqPqqPPq").pack  # fairfold_client


def train(
    form: Form,
    objective: Objective,
    values: Tensor,
    pull: Tensor | None,
    items: Sequence[Places],
    users: Sequence[Places],
    dense: Places,
    samples: Samples,
) -> None:
    """Train ``values``, all that the client trains, in place; raises :class:`~.calls.NotServed` where C cannot.

    ``pull`` is a weight a value that draws it to where it started. ``items`` ([rows, columns] each) and ``users``
    ([columns]) are those that the form has, in its order; ``dense`` has all dense tensors, one after another.
    """
    loaded = serving(*(tensor for tensor in (values, pull, samples.targets) if tensor is not None))
    if not values.is_contiguous():
        raise NotServed
    kept: list[Tensor] = []

    def address(tensor: Tensor | None, dtype: torch.dtype) -> int:
        if tensor is None:
            return 0
        kept.append(tensor.to(dtype).contiguous())
        return kept[-1].data_ptr()

    def places(found: Places) -> tuple[int, int]:
        return address(found.positions, torch.int32), address(found.signs, torch.int8)

    def both(found: Sequence[Places]) -> list[int]:
        """Of the product branch and of the network, 0 for one that the form has not."""
        rest = iter(found)
        branches = [places(next(rest)) if has else (0, 0) for has in (form.product > 0, bool(form.layers))]
        return [pointer for branch in branches for pointer in branch]

    model = _pack_model(
        *(form.product, form.user, form.item, len(form.layers), address(torch.tensor(form.layers), torch.int64)),
        *(form.output, objective.rating, objective.regulariser, _OPTIMISERS[objective.optimiser], objective.rate),
    )
    client = _pack_client(
        *(values.data_ptr(), values.numel(), address(pull, values.dtype)),
        *(*both(items), *both(users), *places(dense), len(items[0].positions)),
        *(address(samples.rows, torch.int32), *samples.rows.shape, address(samples.targets, values.dtype)),
        *(address(samples.ends, torch.int64), samples.ends.numel()),
    )
    settle(loaded.fairfold_train(model, REAL_BYTES[values.dtype], client))
    changed(values)
