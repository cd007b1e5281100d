"""Training of image classifiers on the CPU, client after client: the numbers of ``client_update``, fast.

A client's network is set up once per round, on the memory of what the client holds: a tensor held whole, narrowed or in
factors *is* the trained vector, and runs in that form; a hashed one is recovered into the same buffer before every
step, and its gradient is summed back into slots, both by the compiled kernels.

Clients are not stacked: the products of one client fill the processor already (benchmarks/images.py measures both).
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from fairfold.algorithms.gradient import GradientAlgorithm
from fairfold.federation.architecture import WHOLE_MODEL, ImageArchitecture
from fairfold.federation.clients import Clients, ImageClients
from fairfold.federation.round import Scheduled, Separate, Updates
from fairfold.federation.training import LocalOptimizer
from fairfold.federation.updates import ClientUpdate, ScheduledTask, Update
from fairfold.kernels import ops
from fairfold.kernels.hashing import Layout
from fairfold.subspace.blocks import LowRank
from fairfold.subspace.projection import Hashed, LeadingBlock, Projection
from fairfold.typing import Weights


def client_updates(clients: Clients, scheduled: Scheduled, separate: Separate) -> Updates:  # noqa: ARG001
    """Compute updates of image classifiers: epochs of gradient steps inside the subspaces, client after client."""
    assert isinstance(clients, ImageClients)
    training, algorithm = clients.training, clients.plan.algorithm
    assert isinstance(algorithm, GradientAlgorithm)
    for scheduled_task in scheduled:
        client, task = scheduled_task.client, scheduled_task.task
        model = ClientNetwork(training.architecture, task.projections, task.vectors)
        optimizers = [LocalOptimizer(vector, training.steps) for vector in model.vectors.values()]
        for batch in training.batches(client, clients.source(task.round_number, client)):
            model.recover()
            assert batch.targets is not None
            loss = functional.cross_entropy(model.network(training.pixels(batch.items)), batch.targets)
            for optimizer, gradient in zip(optimizers, model.gradients(loss), strict=True):
                optimizer.step(gradient, gradient.numel())
        yield trained_update(algorithm, scheduled_task, model.vectors, clients.num_samples(client))


def trained_update(algorithm: GradientAlgorithm, trained: ScheduledTask, vectors: Weights, count: int) -> ClientUpdate:
    """The update of a client with these trained vectors, ``count`` samples and no local state."""
    weight, sent = algorithm.weight(count), trained.task.vectors
    learned = vectors if algorithm.sends_weights else {name: vector - sent[name] for name, vector in vectors.items()}
    update = Update({name: vector * weight for name, vector in learned.items()}, weight)
    return ClientUpdate(trained.task, [trained.client], update, {})


@dataclass(frozen=True)
class _Part:
    """A parameter of the network: the vector that its gradient belongs to, its start there, and its hash, if any."""

    parameter: nn.Parameter
    name: str
    start: int
    layout: Layout | None


class ClientNetwork:
    """A client's network in the memory of its ``vectors``; to be called after :meth:`recover`."""

    def __init__(self, architecture: ImageArchitecture, projections: dict[str, Projection], received: Weights) -> None:
        self.vectors = {name: vector.clone() for name, vector in received.items()}
        self.network = architecture.empty_network()
        self._buffers: dict[str, tuple[Layout, Tensor]] = {}
        self._gradients = {name: torch.zeros_like(vector) for name, vector in self.vectors.items()}
        self._parts: list[_Part] = []
        for name, projection in projections.items():
            vector = self.vectors[name]
            if isinstance(projection, LowRank):
                self._place_factors(name, vector, projection)
            elif isinstance(projection, LeadingBlock):
                self._place_parameter(name, vector.view(projection.kept), name)
            else:
                assert isinstance(projection, Hashed)
                self._place_hashed(architecture, name, vector, projection)

    @torch.no_grad()
    def recover(self) -> None:
        """Recover the hashed weights of the network from the vectors."""
        for name, (layout, buffer) in self._buffers.items():
            ops.recover_range(layout, self.vectors[name], 0, buffer)

    def gradients(self, loss: Tensor) -> list[Tensor]:
        """The gradient of every vector, in their order."""
        gradients = dict(self._gradients)
        for name in self._buffers:
            gradients[name].zero_()
        of_parts = torch.autograd.grad(loss, [part.parameter for part in self._parts])
        for part, gradient in zip(self._parts, of_parts, strict=True):
            flat, total = gradient.reshape(-1), gradients[part.name]
            if part.layout is not None:
                ops.accumulate_range(part.layout, flat, part.start, total)
            elif len(flat) == len(total):
                gradients[part.name] = flat
            else:
                total[part.start : part.start + len(flat)] = flat
        return list(gradients.values())

    def _place_hashed(self, architecture: ImageArchitecture, name: str, vector: Tensor, projection: Hashed) -> None:
        layout = None if projection.subspace.is_full else projection.subspace.layout
        full = vector
        if layout is not None:
            full = torch.empty(layout.full_size, dtype=vector.dtype)
            self._buffers[name] = (layout, full)
        if name != WHOLE_MODEL:
            self._place_parameter(name, full.view(architecture.layers[name]), name, 0, layout)
            return
        start = 0
        for layer, tensor in architecture.in_shape({name: full}).items():
            self._place_parameter(layer, tensor, name, start, layout)
            start += tensor.numel()

    def _place_parameter(
        self, layer: str, tensor: Tensor, name: str, start: int = 0, layout: Layout | None = None
    ) -> None:
        parameter, (owner, _, last) = nn.Parameter(tensor), layer.rpartition(".")
        setattr(self.network.get_submodule(owner), last, parameter)
        self._parts.append(_Part(parameter, name, start, layout))

    def _place_factors(self, name: str, vector: Tensor, projection: LowRank) -> None:
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
        self.left, self.right, self.bias = left, right, layer.bias
        self._filter = tuple(layer.weight.shape[1:])
        self._steps = (layer.stride, layer.padding) if isinstance(layer, nn.Conv2d) else None

    def forward(self, inputs: Tensor) -> Tensor:
        if self._steps is None:
            return functional.linear(functional.linear(inputs, self.right), self.left, self.bias)
        rank, (stride, padding) = len(self.right), self._steps
        inner = functional.conv2d(inputs, self.right.view(rank, *self._filter), None, stride, padding)
        return functional.conv2d(inner, self.left.view(-1, rank, 1, 1), self.bias)
