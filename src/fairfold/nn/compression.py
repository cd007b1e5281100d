"""compress and expand: a model with compact layers instead of standard ones, by reduction, and back by recovery."""

from collections.abc import Callable, Collection
from copy import deepcopy
from fractions import Fraction
from math import lcm
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fairfold.errors import InvalidCapacity, InvalidSettings
from fairfold.kernels import ops
from fairfold.kernels.reference import SUM_DTYPE
from fairfold.nn.base import DEFAULT_CHUNK, FairModule, SharedMemory, SubspaceOptions, make_subspace
from fairfold.nn.embedding import FairEmbedding, FairEmbeddingBag
from fairfold.nn.layers import FairConv2d, FairLinear
from fairfold.subspace import Capacity, Subspace
from fairfold.subspace.checks import check_vector

MIN_SIZE = 1024
"""Weight tensors below this many numbers stay dense: compressing them saves next to nothing and costs quality first."""

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
    may use their weights in ways of their own). Everything else is copied: biases, norms, tables that renormalize rows
    or scale gradients by frequency. Hooks of replaced layers are not carried over. Tied weights stay tied.

    Args:
        model: Left as it is.
        capacity: The share of each compressed tensor that is kept (``1/16``, ``"16x"``); or bytes for all parameters
            of the result (``"40MB"``), from which the share follows once what stays dense is paid for.
        seed: Memories get the seeds seed, seed + 1, …, so that layers of one shape do not all collide alike.
        mapping: As ``chunk`` and ``sign``, see :class:`~fairfold.nn.base.SubspaceOptions`.
        chunk: How many neighboring weights share one hash.
        sign: Whether weights have random signs.
        shared: One memory for all compressed layers, the submodule ``shared_memory`` of the first of them.
        layers: Which layers to compress, whatever their size: names, or a function of name and module.
        min_size: Smaller weight tensors stay dense, unless chosen by ``layers``.

    Example:
        >>> model = nn.Sequential(nn.Embedding(5_000, 32), nn.Linear(32, 10))
        >>> small = compress(model, "16x")  # the layer of 320 weights stays dense
        >>> small[0].compact.numel(), 5_000 * 32 // 16
        (10000, 10000)
    """
    chosen = _choose_layers(model, layers, min_size)
    copied = _copy_without(model, [layer for _, layer in chosen])
    if not chosen:
        return copied
    weights = {id(layer.weight): layer.weight for _, layer in chosen}
    share = _compressed_share(model, list(weights.values()), Capacity.parse(capacity))
    options: SubspaceOptions = {"capacity": share, "seed": seed, "mapping": mapping, "chunk": chunk, "sign": sign}
    compact_of: dict[int, FairModule] = {}

    def make_separate(layer: Layer) -> FairModule:
        weight, tied = layer.weight, compact_of.get(id(layer.weight))
        if tied is not None:
            return make_compact_layer(layer, tied.subspace, tied.memory)
        options["seed"] = (seed + len(compact_of)) % 2**64
        subspace = make_subspace(weight.numel(), weight.element_size(), **options)
        compact_of[id(weight)] = make_compact_layer(layer, subspace, subspace.reduce(weight.detach().reshape(-1)))
        return compact_of[id(weight)]

    if shared and chosen[0][0] != "":
        return _replace(copied, chosen, _make_shared(chosen, share, options))
    return _replace(copied, chosen, make_separate)


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
    uncopied: dict[int, Any] = {id(module): module for module in model.modules() if isinstance(module, FairModule)}
    copied: nn.Module = deepcopy(model, uncopied)
    weights: dict[tuple[int, int], Any] = {}

    def make_dense(layer: FairModule) -> nn.Module:
        key = (id(layer.memory), layer.offset)
        dense = make_dense_layer(layer, weights.get(key))
        weights[key] = dense.weight
        return dense

    named = copied.named_modules(remove_duplicate=False)
    return _replace(copied, [(name, layer) for name, layer in named if isinstance(layer, FairModule)], make_dense)


def _can_be_compressed(layer: Any) -> bool:
    if type(layer) in (nn.Embedding, nn.EmbeddingBag):
        # What torch's table writes into itself to keep rows short has no place in shared slots.
        return layer.max_norm is None and not layer.scale_grad_by_freq
    return type(layer) in (nn.Linear, nn.Conv2d)


def _choose_layers(model: nn.Module, layers: Layers, min_size: int) -> list[tuple[str, Layer]]:
    named = list(model.named_modules(remove_duplicate=False))  # one that is used twice under both names
    able: list[tuple[str, Layer]] = [(name, layer) for name, layer in named if _can_be_compressed(layer)]
    if layers is None:
        return [(name, layer) for name, layer in able if layer.weight.numel() >= min_size]
    if callable(layers):
        return [(name, layer) for name, layer in able if layers(name, layer)]
    wanted = {layers} if isinstance(layers, str) else set(layers)
    if unable := sorted(wanted - {name for name, _ in able}):
        given = f"layers {', '.join(map(repr, unable))}"
        given += "" if {name for name, _ in named}.issuperset(unable) else ", not all of them in the model"
        needed = f"names among {', '.join(repr(name) for name, _ in able) or 'none: no layer can be compressed'}"
        raise InvalidSettings(given, needed, "See compress for the kinds that have a compact layer.")
    return [(name, layer) for name, layer in able if name in wanted]


def _copy_without(model: nn.Module, layers: list[Layer]) -> nn.Module:
    """A deep copy in which the weights of ``layers`` are not copied, for they are about to be replaced."""
    replaced = {id(layer) for layer in layers}
    others = [module for module in model.modules() if id(module) not in replaced]
    needed = {id(parameter) for module in others for parameter in module.parameters(recurse=False)}
    uncopied = {id(layer.weight): layer.weight for layer in layers if id(layer.weight) not in needed}
    copied: nn.Module = deepcopy(model, uncopied)
    return copied


def _compressed_share(model: nn.Module, compressed: list[Tensor], capacity: Capacity) -> Fraction:
    """The share of each compressed tensor: as asked for, or what is left of a budget once the dense rest is paid."""
    if capacity.share is not None:
        return capacity.share
    assert capacity.budget is not None  # one of the two is set
    compressed_bytes = sum(weight.nbytes for weight in compressed)
    dense = sum(parameter.nbytes for parameter in model.parameters()) - compressed_bytes
    if capacity.budget <= dense:
        given = f"a budget of {capacity} for a model of which {dense} bytes stay dense"
        remedy = "Compress more layers (layers=, min_size=), or allow more."
        raise InvalidCapacity(given, f"more than {dense} bytes", remedy)
    return min(Fraction(capacity.budget - dense, compressed_bytes), Fraction(1))


def _replace(model: nn.Module, layers: list[tuple[str, Any]], make: Callable[[Any], nn.Module]) -> nn.Module:
    """Replace each of these layers, under all its names, by one that is made once."""
    made: dict[int, nn.Module] = {}
    for name, layer in layers:
        if id(layer) not in made:
            made[id(layer)] = make(layer)
        if name == "":
            return made[id(layer)]
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made[id(layer)])
    return model


@torch.no_grad()
def _make_shared(
    chosen: list[tuple[str, Layer]], share: Fraction, options: SubspaceOptions
) -> Callable[[Layer], FairModule]:
    """Lay one subspace over all chosen weights, one after another; returns what makes the layers that read it.

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
            given = f"layer {name!r} of {weight.dtype} on {weight.device}"
            needed = f"{first.dtype} on {first.device}, as the first layer, for one memory"
            raise InvalidSettings(given, needed, "Compress with shared=False.")
        step = lcm(weight.shape[1:].numel(), options["chunk"])
        offsets[id(weight)] = -(-end // step) * step
        end = offsets[id(weight)] + weight.numel()
        used += weight.numel()
    options["capacity"] = share * used / end if share < 1 else share  # of the coordinates in use
    subspace = make_subspace(end, first.element_size(), **options)
    sums = torch.zeros(subspace.size, dtype=SUM_DTYPE[first.dtype], device=first.device)
    counts = torch.zeros(subspace.size, dtype=torch.int32, device=first.device)
    for name, weight in named.values():
        flat = weight.detach().reshape(-1)
        check_vector(f"{name}.weight", flat, flat.numel())
        ops.accumulate_range(subspace.layout, flat, offsets[id(weight)], sums, counts)
    memory = SharedMemory(subspace, sums.div_(counts.clamp_(min=1)).to(first.dtype))

    def make(layer: Layer) -> FairModule:
        result = make_compact_layer(layer, None, None)
        result.share(memory, offsets[id(layer.weight)], owner=layer is chosen[0][1])
        return result

    return make


Module = TypeVar("Module", bound=nn.Module)

_TABLE = ("num_embeddings", "embedding_dim", "padding_idx", "sparse", "max_norm", "norm_type")
_CONVOLUTION = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")
_KINDS: list[tuple[type[Any], type[Any], tuple[str, ...]]] = [
    (nn.Embedding, FairEmbedding, _TABLE),
    (nn.EmbeddingBag, FairEmbeddingBag, (*_TABLE, "mode", "include_last_offset")),
    (nn.Linear, FairLinear, ("in_features", "out_features")),
    (nn.Conv2d, FairConv2d, _CONVOLUTION),
]
"""A standard layer, its compact counterpart, and the options of both, which are also their attributes."""


def make_compact_layer(layer: Any, subspace: Subspace | None, compact: Tensor | None) -> FairModule:
    """A compact layer with the options and the bias of ``layer`` that reads ``compact``.

    Made on the meta device, where drawing initial values costs nothing and leaves the random state alone. Without a
    subspace it is left without a vector, for :meth:`FairModule.share`.
    """
    options: SubspaceOptions = {"size": layer.weight.numel()}
    if subspace is not None:
        options = {"size": subspace.size, "seed": subspace.seed, "mapping": subspace.mapping}
        head = 0 if subspace.mapping != "ranked" or subspace.is_full else subspace.head
        options |= {"chunk": subspace.chunk, "head": head, "sign": subspace.sign}
    kind, names = next((compact, names) for standard, compact, names in _KINDS if isinstance(layer, standard))
    result: FairModule = kind(**_layer_options(layer, names), device="meta", dtype=layer.weight.dtype, **options)
    if compact is not None:
        # A tied layer is handed the very parameter of the first one.
        requires_grad = layer.weight.requires_grad
        result.compact = compact if isinstance(compact, nn.Parameter) else nn.Parameter(compact, requires_grad)
    return _with_bias(result, layer)


def make_dense_layer(layer: FairModule, weight: nn.Parameter | None) -> nn.Module:
    """A standard layer with the recovered weight of ``layer``, or with ``weight`` where a tied layer has it already."""
    kinds = ((standard, names) for standard, compact, names in _KINDS if isinstance(layer, compact))
    kind, names = next(kinds, (None, ()))
    if kind is None:
        raise TypeError(f"{type(layer).__name__} has no standard twin")
    result: nn.Module = kind(**_layer_options(layer, names), device="meta", dtype=layer.memory.dtype)
    if weight is None:
        full = layer.full_weight()
        padding: int | None = getattr(layer, "padding_idx", None)
        if padding is not None:
            full[padding] = 0  # what the compact table answers
        weight = nn.Parameter(full, layer.memory.requires_grad)
    result.weight = weight
    return _with_bias(result, layer)


def _layer_options(layer: Any, names: tuple[str, ...]) -> dict[str, Any]:
    options = {name: getattr(layer, name) for name in names}
    return options | ({"bias": layer.bias is not None} if hasattr(layer, "bias") else {})


def _with_bias(module: Module, layer: nn.Module) -> Module:
    """The module with a copy of the layer's bias, in its mode."""
    bias = getattr(layer, "bias", None)
    if isinstance(bias, Tensor):
        module.bias = nn.Parameter(bias.detach().clone(), bias.requires_grad)
    return module.train(layer.training)
