"""compress and expand: a model of standard layers to its compact twin by reduction, and back by recovery."""

from collections.abc import Callable, Collection
from copy import deepcopy
from fractions import Fraction
from math import lcm
from typing import Any

import torch
from torch import Tensor, nn

from fairfold.errors import InvalidCapacity, InvalidSettings
from fairfold.kernels import ops
from fairfold.nn.base import FairModule, SharedMemory
from fairfold.nn.placement import DEFAULT_CHUNK, Placement, place
from fairfold.nn.twins import compact_twin, dense_twin
from fairfold.subspace import Capacity
from fairfold.subspace.checks import SUM_DTYPE, check_vector

MIN_SIZE = 1024
"""Weight tensors below this many numbers stay dense: folding them saves next to nothing and costs quality first."""

Layer = Any  # one of torch's layers with a weight; torch types attributes of modules too loosely to be of use
Layers = Callable[[str, nn.Module], bool] | Collection[str] | None


def compress(
    model: nn.Module,
    capacity: str | float | Fraction | Capacity = "16x",
    *,
    seed: int = 0,
    mapping: str | None = None,
    chunk: int = DEFAULT_CHUNK,
    sign: bool = True,
    shared: bool = False,
    layers: Layers = None,
    min_size: int = MIN_SIZE,
) -> nn.Module:
    """A copy of ``model`` that keeps only compact vectors of its large weight tensors, reduced from the same weights.

    ``nn.Embedding``, ``nn.EmbeddingBag``, ``nn.Linear`` and ``nn.Conv2d`` are replaced (these very classes: subclasses
    may use their weights in ways of their own). Everything else is copied: biases, norms, layers with fewer than
    ``min_size`` weights, tables that renormalise rows or scale gradients by frequency. Hooks of replaced
    layers are not carried over. Tied weights stay tied.

    Args:
        model: Left as it is.
        capacity: The share of each compressed tensor that is kept (``1/16``, ``"16x"``); or bytes for all parameters
            of the result (``"40MB"``), from which the share follows once what stays dense is paid for.
        seed: Seed of the hash. Tables with memories of their own are given the seeds seed, seed + 1, …, so that layers
            of one shape do not all collide alike.
        mapping: See :class:`~fairfold.nn.placement.Placement`.
        chunk: How many neighbouring weights share one hash.
        sign: Whether weights have random signs.
        shared: One memory for all compressed layers: weights of any layer share slots with those of any other. It is
            the submodule ``shared_memory`` of the first of them.
        layers: Which layers to compress, whatever their size: names, or a function of name and module. Default: all
            that can be and have at least ``min_size`` weights.
        min_size: Smaller weight tensors stay dense, unless chosen by ``layers``.

    Example:
        >>> model = nn.Sequential(nn.Embedding(5_000, 32), nn.Linear(32, 10))
        >>> small = compress(model, "16x")  # the layer of 320 weights stays dense
        >>> small[0].compact.numel(), 5_000 * 32 // 16
        (10000, 10000)
    """
    chosen = _chosen_layers(model, layers, min_size)
    copied = _copied_without(model, [layer for _, layer in chosen])
    if not chosen:
        return copied
    weights = {id(layer.weight): layer.weight for _, layer in chosen}
    share = _share(model, list(weights.values()), Capacity.parse(capacity))
    options: Placement = {"capacity": share, "seed": seed, "mapping": mapping, "chunk": chunk, "sign": sign}
    of_weight: dict[int, FairModule] = {}

    def with_its_own(layer: Layer) -> FairModule:
        weight, tied = layer.weight, of_weight.get(id(layer.weight))
        if tied is not None:
            return compact_twin(layer, tied.subspace, tied.memory)
        options["seed"] = (seed + len(of_weight)) % 2**64
        subspace = place(weight.numel(), weight.element_size(), **options)
        of_weight[id(weight)] = compact_twin(layer, subspace, subspace.reduce(weight.detach().reshape(-1)))
        return of_weight[id(weight)]

    if shared and chosen[0][0] != "":
        return _replaced(copied, chosen, _sharing(chosen, share, options))
    return _replaced(copied, chosen, with_its_own)


def expand(model: nn.Module) -> nn.Module:
    """A copy of ``model`` with standard layers in place of compact ones, their weights recovered.

    The padding row of a table, which reads as zeros, is stored as zeros, also where another layer is tied to it.

    Example:
        >>> small = compress(nn.Sequential(nn.Embedding(5_000, 32)), "16x")
        >>> ids = torch.arange(8)
        >>> torch.equal(expand(small)(ids), small(ids))
        True
    """
    # Compact layers are recovered below, so not worth copying.
    kept: dict[int, Any] = {id(module): module for module in model.modules() if isinstance(module, FairModule)}
    copied: nn.Module = deepcopy(model, kept)
    weights: dict[tuple[int, int], Any] = {}

    def recovered(layer: FairModule) -> nn.Module:
        place_of = (id(layer.memory), layer.offset)
        twin = dense_twin(layer, weights.get(place_of))
        weights[place_of] = twin.weight
        return twin

    compact = [(name, module) for name, module in _every_place(copied) if isinstance(module, FairModule)]
    return _replaced(copied, compact, recovered)


def _can_be_compressed(layer: Any) -> bool:
    kind = type(layer)
    if kind is nn.Embedding or kind is nn.EmbeddingBag:
        # What torch's table writes into itself to keep rows short has no place in shared slots.
        return layer.max_norm is None and not layer.scale_grad_by_freq
    return kind is nn.Linear or kind is nn.Conv2d


def _every_place(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Every place a module stands in, also the second and third place of one used twice."""
    return list(model.named_modules(remove_duplicate=False))


def _chosen_layers(model: nn.Module, layers: Layers, min_size: int) -> list[tuple[str, Layer]]:
    named = _every_place(model)
    able: list[tuple[str, Layer]] = [(name, layer) for name, layer in named if _can_be_compressed(layer)]
    if layers is None:
        return [(name, layer) for name, layer in able if layer.weight.numel() >= min_size]
    if callable(layers):
        return [(name, layer) for name, layer in able if layers(name, layer)]
    wanted = {layers} if isinstance(layers, str) else set(layers)
    unable = sorted(wanted - {name for name, _ in able})
    if unable:
        known = {name for name, _ in named}
        raise InvalidSettings(
            f"layers {', '.join(repr(name) for name in unable)}"
            + ("" if known.issuperset(unable) else ", not all of them in the model"),
            f"names among {', '.join(repr(name) for name, _ in able) or 'none: no layer can be compressed'}",
            "See compress for the kinds that have a compact twin.",
        )
    return [(name, layer) for name, layer in able if name in wanted]


def _copied_without(model: nn.Module, layers: list[Layer]) -> nn.Module:
    """A deep copy in which the weights of ``layers`` are not copied, for they are about to be replaced."""
    replaced = {id(layer) for layer in layers}
    needed = {
        id(parameter)
        for module in model.modules()
        if id(module) not in replaced
        for parameter in module.parameters(recurse=False)
    }
    copied: nn.Module = deepcopy(
        model, {id(layer.weight): layer.weight for layer in layers if id(layer.weight) not in needed}
    )
    return copied


def _share(model: nn.Module, folded: list[Tensor], capacity: Capacity) -> Fraction:
    """The share of each folded tensor: as asked for, or what is left of a budget once the dense rest is paid."""
    if capacity.share is not None:
        return capacity.share
    assert capacity.budget is not None  # one of the two is set
    total = sum(parameter.nbytes for parameter in model.parameters())
    of_folded = sum(weight.nbytes for weight in folded)
    dense = total - of_folded
    if capacity.budget <= dense:
        raise InvalidCapacity(
            f"a budget of {capacity} for a model of which {dense} bytes stay dense",
            f"more than {dense} bytes",
            "Compress more layers (layers=, min_size=), or allow more.",
        )
    return min(Fraction(capacity.budget - dense, of_folded), Fraction(1))


def _replaced(model: nn.Module, layers: list[tuple[str, Any]], make: Callable[[Any], nn.Module]) -> nn.Module:
    """The model with another layer in every place of each of these, made once."""
    twins: dict[int, nn.Module] = {}
    for name, layer in layers:
        if id(layer) not in twins:
            twins[id(layer)] = make(layer)
        if name == "":
            return twins[id(layer)]
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, twins[id(layer)])
    return model


@torch.no_grad()
def _sharing(chosen: list[tuple[str, Layer]], share: Fraction, options: Placement) -> Callable[[Layer], FairModule]:
    """One subspace over all chosen weights, one after another: what makes the twins that read it.

    A table is looked up by row number, so each tensor begins at a multiple of its row size (and of the chunk); the few
    coordinates skipped for that belong to no one, and count for nothing in the means.
    """
    offsets: dict[int, int] = {}
    end = used = 0
    named: dict[int, tuple[str, Tensor]] = {}
    for name, layer in chosen:
        named.setdefault(id(layer.weight), (name, layer.weight))
    first: Tensor = chosen[0][1].weight
    for name, weight in named.values():
        if (weight.dtype, weight.device) != (first.dtype, first.device):
            raise InvalidSettings(
                f"layer {name!r} of {weight.dtype} on {weight.device}",
                f"{first.dtype} on {first.device}, as the first layer, for one memory",
                "Compress with shared=False.",
            )
        step = lcm(weight.shape[1:].numel(), options["chunk"])
        offsets[id(weight)] = -(-end // step) * step
        end = offsets[id(weight)] + weight.numel()
        used += weight.numel()
    options["capacity"] = share * used / end if share < 1 else share  # of the coordinates in use
    subspace = place(end, first.element_size(), **options)
    sums = torch.zeros(subspace.size, dtype=SUM_DTYPE[first.dtype], device=first.device)
    counts = torch.zeros(subspace.size, dtype=torch.int32, device=first.device)
    for name, weight in named.values():
        flat = weight.detach().reshape(-1)
        check_vector(f"{name}.weight", flat, flat.numel())
        ops.accumulate_range(subspace.layout, flat, offsets[id(weight)], sums, counts)
    memory = SharedMemory(subspace, sums.div_(counts.clamp_(min=1)).to(first.dtype))

    def make(layer: Layer) -> FairModule:
        twin = compact_twin(layer, None, None)
        twin.share(memory, offsets[id(layer.weight)], owner=layer is chosen[0][1])
        return twin

    return make
