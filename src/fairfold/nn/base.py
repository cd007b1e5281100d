"""The base of compact layers: a compact vector, its subspace, and where in it the layer's weights begin."""

from collections.abc import Sequence
from fractions import Fraction
from inspect import signature
from math import prod
from typing import Any, TypedDict, Unpack

import torch
from torch import Tensor, nn

from fairfold.errors import InvalidCapacity, InvalidDevice, InvalidState, InvalidSubspace, InvalidVector, did_you_mean
from fairfold.kernels import ops, traced
from fairfold.subspace import Capacity, Subspace, fit_sizes

DEFAULT_CHUNK = 1
"""Coordinates hashed together by default. Plain hashing loses quality with longer chunks, ranked tables do not up to 8
(docs/decisions/chunk.md): use ``mapping="ranked", chunk=8`` where items come in order of popularity."""


class SubspaceOptions(TypedDict, total=False):
    """The keywords every compact layer takes; one of size, capacity and budget must be there."""

    size: int | None  # m, the number of slots, as it is
    capacity: str | float | Fraction | Capacity | None  # a share (1/16), a compression ("16x") or a budget ("40MB")
    budget: str | int | None  # bytes, as a number or as text ("40MB")
    seed: int  # of the hash; layers (devices) nest only if they share it
    mapping: str | None  # "element", "chunk" or "ranked"; left out, what chunk and head imply
    chunk: int  # how many neighboring weights share one hash
    head: int  # for "ranked": how many leading weights own their slot; 0 picks half of the size
    sign: bool  # whether weights have random signs


def make_subspace(full_size: int, itemsize: int = 4, **options: Unpack[SubspaceOptions]) -> Subspace:
    """The subspace of ``full_size`` coordinates that these :class:`SubspaceOptions` describe.

    A capacity or a budget gives the largest size within it that is a whole number of chunks; a size is taken as it is.
    """
    size, capacity, budget = options.get("size"), options.get("capacity"), options.get("budget")
    chunk, head = options.get("chunk", DEFAULT_CHUNK), options.get("head", 0)
    mapping = options.get("mapping")
    if mapping is None:
        mapping = "ranked" if head else "element" if chunk == 1 else "chunk"
    given = [name for name, value in (("size", size), ("capacity", capacity), ("budget", budget)) if value is not None]
    if len(given) != 1:
        named = " and ".join(given) if given else "no size, capacity or budget"
        raise InvalidCapacity(named, "exactly one of them", "Write e.g. capacity=1/16.")
    if size is None:
        size = _largest_size(
            _parse_capacity(capacity, budget).limit(full_size, itemsize), full_size, mapping, chunk, head
        )
    return Subspace(full_size, size, options.get("seed", 0), mapping, chunk, head, options.get("sign", True))


def _parse_capacity(capacity: str | float | Fraction | Capacity | None, budget: str | int | None) -> Capacity:
    if capacity is not None:
        return Capacity.parse(capacity)
    parsed = Capacity.parse(budget if isinstance(budget, str) else f"{budget}B")
    if parsed.budget is None:
        raise InvalidCapacity(f"budget={budget!r}", 'bytes, such as "40MB"', "Give a share as capacity=.")
    return parsed


def _largest_size(limit: int, full_size: int, mapping: str, chunk: int, head: int) -> int:
    """The largest size of whole chunks that is at most ``limit``."""
    if head == 0 or limit >= full_size:
        unit = 2 * chunk if mapping == "ranked" else chunk
        return fit_sizes([limit], full_size, unit=max(unit, 1))[0]
    if limit < head + chunk:
        needed = f"at least {head + chunk}, the head and one hashed chunk"
        remedy = "Use a smaller head or a larger capacity."
        raise InvalidCapacity(f"head={head} in a memory of {limit} slots", needed, remedy)
    return head + (limit - head) // chunk * chunk


Device = torch.device | str | None

_STATE_FIELDS = ("format", "full_size", "head", "tail", "chunk", "seed low", "seed high", "sign", "offset", "weights")
_STATE_FORMAT = 1
_EXTRA = "_extra_state"


def _check_layout(state: object, expected: Tensor, name: str) -> None:
    """Refuse a saved layout that differs: its numbers would silently be read by other weights."""
    if not isinstance(state, Tensor) or state.shape != expected.shape or state.is_floating_point():
        given, remedy = type(state).__name__, "Save the state with the same version of fairfold."
        raise InvalidState(f"a saved layout of {name} that is {given}", f"{len(_STATE_FIELDS)} integers", remedy)
    different = (state.cpu() != expected).nonzero().flatten().tolist()
    if different:
        given, needed = (
            ", ".join(f"{_STATE_FIELDS[index]}={int(numbers[index])}" for index in different)
            for numbers in (state, expected)
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
    """One compact vector for several layers: each layer's weights are a range of one long full vector."""

    def __init__(self, subspace: Subspace, compact: Tensor) -> None:
        super().__init__(subspace)
        self.compact = nn.Parameter(compact)

    def extra_repr(self) -> str:
        return f"{self.subspace.full_size} weights in {self.subspace.size} slots"


class FairModule(CompactVector):
    """A layer whose weight tensor, of this shape, exists only as a compact vector, its own or one it shares."""

    def __init__(
        self, shape: Sequence[int], device: Device, dtype: torch.dtype | None, options: SubspaceOptions
    ) -> None:
        dtype = dtype if dtype is not None else torch.get_default_dtype()
        if unknown := options.keys() - SubspaceOptions.__annotations__.keys():
            name = min(unknown)
            known = {*signature(type(self)).parameters, *SubspaceOptions.__annotations__} - {"options"}
            raise TypeError(f"{type(self).__name__} has no option {name!r}{did_you_mean(name, sorted(known))}")
        if min(shape) < 1:
            remedy = "Keep a layer without weights as it is."
            raise InvalidSubspace(f"weights of shape {tuple(shape)}", "at least one weight", remedy)
        subspace = make_subspace(prod(shape), dtype.itemsize, **options)
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
            given = f"a compact vector of shape {None if memory is None else tuple(memory.shape)}"
            remedy = "Put back a vector of the layer's own size, or make a new layer."
            raise InvalidVector(given, f"shape ({self.subspace.size},)", remedy)
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
            given = f"{self.weights} weights from coordinate {offset} on"
            needed = f"a range within the {memory.subspace.full_size} coordinates of the memory"
            raise InvalidVector(given, needed, "Make the memory's subspace over all the layers' weights.")
        self.compact, self.subspace, self.offset = None, memory.subspace, offset
        self.__dict__["_shared"] = memory
        if owner:
            self.shared_memory = memory

    @property
    def weight(self) -> Tensor:
        """The whole weight tensor, recovered and differentiable, made anew with every call: writes to it are lost."""
        return traced.recover_span(self.memory, self.subspace.layout, self.offset, self.weights).view(self.shape)

    @torch.no_grad()
    def full_weight(self) -> Tensor:
        """The whole weight tensor, recovered: as large as that of the standard layer, so mind the memory."""
        out = torch.empty(self.weights, dtype=self.memory.dtype, device=self.memory.device)
        ops.recover_range(self.subspace.layout, self.memory.detach(), self.offset, out)
        return out.view(self.shape)

    def _subspace_repr(self) -> str:
        subspace = self.subspace
        chunk = f", chunk={subspace.chunk}" if subspace.chunk > 1 else ""
        shared = f", shared from {self.offset}" if self.is_shared else ""
        return f"size={subspace.size}, mapping={subspace.mapping!r}{chunk}{shared}"


def check_same_device(name: str, operand: Tensor, memory: Tensor) -> None:
    """Refuse an operand on another device than the layer."""
    if operand.device != memory.device:
        remedy = f"Move one of them, e.g. {name}.to({str(memory.device)!r})."
        raise InvalidDevice(f"{name} on {operand.device}", f"{memory.device}, where the layer is", remedy)
