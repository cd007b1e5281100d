"""What a device of images computes, fast: the numbers of the algorithm's own ``answer``.

A device's network is set up once per round, on the memory of what the device holds: a tensor held whole, narrowed or in
factors *is* the trained vector, and runs in that form; a hashed one is recovered into the same buffer before every
step, and its gradient is summed back into slots, both by the native kernels. Nothing is hashed in Python, no index is
stored, and nothing passes through autograd but the network itself.

Clients take turns. The work of a step is in matrix products that fill the processor for one client already; stacked
(`torch.func.vmap`), the weights of a cohort fall out of the cache (benchmarks/images.py measures both).
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout
from fairfold.projections import Hashed, LeadingBlock, LowRank, Projection
from fairfold.protocol.architecture import WHOLE_MODEL, ImageArchitecture
from fairfold.protocol.people import ImagePeople, People
from fairfold.protocol.steps import LocalSteps
from fairfold.protocol.words import Answer, Visit, Word
from fairfold.values import Weights


def answers(people: People, visits: Iterable[Visit], alone: Mapping[int, str]) -> Iterator[Word]:  # noqa: ARG001
    """E epochs of gradient steps inside the subspaces; see :data:`fairfold.protocol.round.Backend`."""
    assert isinstance(people, ImagePeople)
    work, algorithm = people.work, people.plan.algorithm
    for visit in visits:
        sent = visit.sent
        held = DeviceNetwork(work.architecture, sent.projections, sent.vectors)
        optimisers = [LocalSteps(vector, work.steps) for vector in held.vectors.values()]
        for batch in work.batches(visit.client, people.source(sent.round_number, visit.client)):
            held.recover()
            assert batch.targets is not None
            loss = functional.cross_entropy(held.network(work.pixels(batch.items)), batch.targets)
            for optimiser, slope in zip(optimisers, held.gradients(loss), strict=True):
                optimiser.step(slope, slope.numel())
        yield trained_word(algorithm, visit, held.vectors, people.samples(visit.client))


def trained_word(algorithm: Any, visit: Visit, vectors: Weights, samples: int) -> Word:
    """What a device says that has trained its vectors and keeps nothing for itself."""
    weight = algorithm.weight(samples)
    sent = visit.sent.vectors
    learned = vectors if algorithm.values else {name: vector - sent[name] for name, vector in vectors.items()}
    return Word(visit.sent, [visit.client], Answer({n: vector * weight for n, vector in learned.items()}, weight), {})


@dataclass(frozen=True)
class _Part:
    """A parameter of the network: which vector its gradient belongs to, from where on, and by which hash, if any."""

    parameter: nn.Parameter
    name: str
    start: int
    layout: Layout | None


class DeviceNetwork:
    """One device's network in the memory of what it holds.

    Attributes:
        vectors: What is trained; the network sees changes made in place.
        network: To be called after :meth:`recover`.
    """

    def __init__(self, architecture: ImageArchitecture, projections: dict[str, Projection], received: Weights) -> None:
        self.vectors = {name: vector.clone() for name, vector in received.items()}
        self.network = architecture.empty_network()
        self._buffers: dict[str, tuple[Layout, Tensor]] = {}
        self._gradients = {name: torch.zeros_like(vector) for name, vector in self.vectors.items()}
        self._parts: list[_Part] = []
        for name, projection in projections.items():
            vector = self.vectors[name]
            if isinstance(projection, LowRank):
                self._factor(name, vector, projection)
            elif isinstance(projection, LeadingBlock):
                self._place(name, vector.view(projection.kept), name)
            else:
                assert isinstance(projection, Hashed)
                self._place_hashed(architecture, name, vector, projection)

    @torch.no_grad()
    def recover(self) -> None:
        """Bring the network up to the vectors."""
        for name, (layout, buffer) in self._buffers.items():
            ops.recover_range(layout, self.vectors[name], 0, buffer)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """The gradient of every vector, in their order."""
        found = torch.autograd.grad(loss, [part.parameter for part in self._parts])
        result = dict(self._gradients)
        for name in self._buffers:
            result[name].zero_()
        for part, slope in zip(self._parts, found, strict=True):
            flat, into = slope.reshape(-1), result[part.name]
            if part.layout is not None:
                ops.accumulate_range(part.layout, flat, part.start, into)
            elif len(flat) == len(into):
                result[part.name] = flat
            else:
                into[part.start : part.start + len(flat)] = flat
        return list(result.values())

    def _place_hashed(self, architecture: ImageArchitecture, name: str, vector: Tensor, projection: Hashed) -> None:
        layout = None if projection.subspace.is_full else projection.subspace.layout
        full = vector
        if layout is not None:
            full = torch.empty(layout.full_size, dtype=vector.dtype)
            self._buffers[name] = (layout, full)
        if name != WHOLE_MODEL:
            self._place(name, full.view(architecture.layers[name]), name, 0, layout)
            return
        start = 0
        for layer, tensor in architecture.in_shape({name: full}).items():
            self._place(layer, tensor, name, start, layout)
            start += tensor.numel()

    def _place(self, layer: str, tensor: Tensor, name: str, start: int = 0, layout: Layout | None = None) -> None:
        """Make a tensor a parameter of the network; it need not have the shape the layer was made with."""
        owner, _, last = layer.rpartition(".")
        parameter = nn.Parameter(tensor)
        setattr(self.network.get_submodule(owner), last, parameter)
        self._parts.append(_Part(parameter, name, start, layout))

    def _factor(self, name: str, vector: Tensor, projection: LowRank) -> None:
        """Put a layer of two factors in the place of one."""
        owner, _, _ = name.rpartition(".")
        above, _, last = owner.rpartition(".")
        left, right = (nn.Parameter(factor) for factor in projection.factors(vector))
        layer = self.network.get_submodule(owner)
        assert isinstance(layer, nn.Linear | nn.Conv2d)
        setattr(self.network.get_submodule(above), last, _Factored(layer, left, right))
        self._parts += [_Part(left, name, 0, None), _Part(right, name, left.numel(), None)]


class _Factored(nn.Module):
    """A layer whose weight is left @ right: first the right factor (for a convolution, r filters), then the left."""

    def __init__(self, layer: nn.Linear | nn.Conv2d, left: nn.Parameter, right: nn.Parameter) -> None:
        super().__init__()
        self.left, self.right = left, right
        self.bias = layer.bias
        self._filter = tuple(layer.weight.shape[1:])
        self._steps = (layer.stride, layer.padding) if isinstance(layer, nn.Conv2d) else None

    def forward(self, given: Tensor) -> Tensor:
        if self._steps is None:
            return functional.linear(functional.linear(given, self.right), self.left, self.bias)
        rank, (stride, padding) = len(self.right), self._steps
        inner = functional.conv2d(given, self.right.view(rank, *self._filter), None, stride, padding)
        return functional.conv2d(inner, self.left.view(-1, rank, 1, 1), self.bias)
