"""What every compact layer is made of: one compact vector, a subspace, and where in it the layer's weights begin."""

from collections.abc import Sequence
from inspect import signature
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from fairfold.errors import InvalidDevice, InvalidState, InvalidSubspace, InvalidVector, nearest
from fairfold.kernels import ops, traced
from fairfold.nn.placement import Placement, place
from fairfold.subspace import Subspace

Device = torch.device | str | None

_STATE_FIELDS = ("format", "full_size", "head", "tail", "chunk", "seed low", "seed high", "sign", "offset", "weights")
_STATE_FORMAT = 1
_EXTRA = "_extra_state"


def _check_layout(state: object, expected: Tensor, name: str) -> None:
    """Refuse a saved layout that differs: its numbers would be read by other weights without a word."""
    if not isinstance(state, Tensor) or state.shape != expected.shape or state.is_floating_point():
        given, remedy = type(state).__name__, "Save the state with the same version of fairfold."
        raise InvalidState(f"a saved layout of {name} that is {given}", f"{len(_STATE_FIELDS)} integers", remedy)
    different = (state.cpu() != expected).nonzero().flatten().tolist()
    if different:
        given, needed = (
            ", ".join(f"{_STATE_FIELDS[which]}={int(of[which])}" for which in different) for of in (state, expected)
        )
        remedy = "Make the module with the size, seed, mapping and chunk it was saved with."
        raise InvalidState(f"a saved layout of {name} with {given}", needed, remedy)


class CompactVector(nn.Module):
    """A compact vector and the subspace it lives in, with a state that remembers both."""

    compact: nn.Parameter | None  # of length subspace.size; None in a layer that reads another module's vector

    def __init__(self, subspace: Subspace) -> None:
        super().__init__()
        self.subspace = subspace  # where each of the full weights lives in the vector
        self.offset = 0  # the first coordinate of the subspace that belongs to this module
        self.weights = subspace.full_size  # how many coordinates do

    def get_extra_state(self) -> Tensor:
        """The integers that fix which weight reads which slot, as a tensor: the one form every file format can hold."""
        layout, seed = self.subspace.layout, self.subspace.seed
        numbers = [_STATE_FORMAT, layout.full_size, layout.head, layout.tail, layout.chunk]
        numbers += [seed & 0xFFFFFFFF, seed >> 32, int(layout.signed), self.offset, self.weights]
        return torch.tensor(numbers, dtype=torch.int64, device="cpu")

    def set_extra_state(self, state: object) -> None:
        """Nothing is taken over from a file: a layout that differs is refused."""
        _check_layout(state, self.get_extra_state(), type(self).__name__)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        # Checked before torch copies anything, so that a refused state leaves this module as it was.
        name = prefix.removesuffix(".") or type(self).__name__
        if prefix + _EXTRA in state_dict:
            _check_layout(state_dict[prefix + _EXTRA], self.get_extra_state(), name)
        saved = state_dict.get(prefix + "compact")
        if self.compact is not None and saved is not None and saved.shape != (self.subspace.size,):
            given, needed = (
                f"a compact vector of shape {tuple(saved.shape)} for {name}",
                f"shape ({self.subspace.size},)",
            )
            raise InvalidState(given, needed, "Make the module with the size it was saved with.")
        super()._load_from_state_dict(state_dict, prefix, *rest)


class SharedMemory(CompactVector):
    """One compact vector for several layers: each layer's weights are a range of one long full vector.

    Args:
        subspace: Over all the layers' weights one after another.
        compact: The vector.
    """

    def __init__(self, subspace: Subspace, compact: Tensor) -> None:
        super().__init__(subspace)
        self.compact = nn.Parameter(compact)

    def extra_repr(self) -> str:
        """Sizes, as torch's modules show them."""
        return f"{self.subspace.full_size} weights in {self.subspace.size} slots"


class FairModule(CompactVector):
    """A layer whose weight tensor exists only as a compact vector, its own or one it shares.

    Args:
        shape: Shape of the full weight tensor, which is never made.
        device: Where the vector lives.
        dtype: Type of its numbers.
        placement: See :class:`~fairfold.nn.placement.Placement`.
    """

    def __init__(self, shape: Sequence[int], device: Device, dtype: torch.dtype | None, placement: Placement) -> None:
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        if unknown := placement.keys() - Placement.__annotations__.keys():
            name, known = min(unknown), {*signature(type(self)).parameters, *Placement.__annotations__} - {"placement"}
            raise TypeError(f"{type(self).__name__} has no option {name!r}{nearest(name, sorted(known))}")
        if min(shape) < 1:
            raise InvalidSubspace(
                f"weights of shape {tuple(shape)}", "at least one weight", "Keep a layer without weights as it is."
            )
        subspace = place(prod(shape), dtype.itemsize, **placement)
        super().__init__(subspace)
        self.shape = tuple(shape)
        self.__dict__["_shared"] = None  # not an attribute torch sees: the memory's parameters belong to its owner
        self.compact = nn.Parameter(torch.empty(subspace.size, device=device, dtype=dtype))

    @property
    def memory(self) -> Tensor:
        """The compact vector this layer reads: its own, or the shared one."""
        shared: SharedMemory | None = self.__dict__["_shared"]
        memory = self.compact if shared is None else shared.compact
        if memory is None or memory.shape != (self.subspace.size,):
            raise InvalidVector(
                f"a compact vector of shape {None if memory is None else tuple(memory.shape)}",
                f"shape ({self.subspace.size},)",
                "Put back a vector of the layer's own size, or make a new layer.",
            )
        return memory

    @property
    def is_shared(self) -> bool:
        """Whether the compact vector belongs to a :class:`SharedMemory`."""
        return self.__dict__["_shared"] is not None

    def share(self, memory: SharedMemory, offset: int, *, owner: bool = False) -> None:
        """Give up the layer's own vector and read ``memory`` from coordinate ``offset`` on.

        One of the layers must be its ``owner``: the memory becomes its submodule, and so part of the model's state.
        """
        if not 0 <= offset <= memory.subspace.full_size - self.weights:
            raise InvalidVector(
                f"{self.weights} weights from coordinate {offset} on",
                f"a range within the {memory.subspace.full_size} coordinates of the memory",
                "Make the memory's subspace over all the layers' weights.",
            )
        self.compact = None
        self.subspace = memory.subspace
        self.offset = offset
        self.__dict__["_shared"] = memory
        if owner:
            self.shared_memory = memory

    @property
    def weight(self) -> Tensor:
        """The whole weight tensor, recovered, which gradients flow back from: for code that asks a layer for it.

        It is made anew with every call and as large as the layer this one stands for; what is written to it is lost.
        """
        found = traced.recovered_span(self.memory, self.subspace.layout, self.offset, self.weights)
        return found.view(self.shape)

    @torch.no_grad()
    def full_weight(self) -> Tensor:
        """The whole weight tensor, recovered: as large as the layer this one stands for, so mind the memory."""
        out = torch.empty(self.weights, dtype=self.memory.dtype, device=self.memory.device)
        ops.recover_range(self.subspace.layout, self.memory.detach(), self.offset, out)
        return out.view(self.shape)

    def _placement_repr(self) -> str:
        subspace = self.subspace
        parts = [f"size={subspace.size}", f"mapping={subspace.mapping!r}"]
        if subspace.chunk > 1:
            parts.append(f"chunk={subspace.chunk}")
        if self.is_shared:
            parts.append(f"shared from {self.offset}")
        return ", ".join(parts)


def check_same_device(name: str, operand: Tensor, memory: Tensor) -> None:
    """Refuse an operand on another device than the layer."""
    if operand.device != memory.device:
        raise InvalidDevice(
            f"{name} on {operand.device}",
            f"{memory.device}, where the layer is",
            f"Move one of them, e.g. {name}.to({str(memory.device)!r}).",
        )
