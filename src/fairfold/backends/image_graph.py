"""A cohort of image devices trained as one program; on a GPU its steps are captured once and replayed.

Every client's weights stand realised in one line of a matrix. A step is forward and backward of all networks at once
(:mod:`.stacked_layers`), then one pass over the slots of what the clients hold: gradients are added up, the optimiser
moves the slots, and the weights are brought up to date (:func:`fairfold.kernels.ops.step_slots`). Methods differ by
data alone: which weights live in which slot, and which a client does not have. All sums have a fixed order.

Clients stand in the order of their number of steps, so those still at work are the first ones; there is one recorded
program for every number of them.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.backends.cuda_graph import capture, step_sizes
from fairfold.backends.groups import MOMENTS, Ahead
from fairfold.backends.image_layout import Lines
from fairfold.backends.image_native import trained_word
from fairfold.backends.stacked_layers import LEFT, RIGHT, Part, stacked_network
from fairfold.kernels import ops
from fairfold.kernels.reference_stacked import SlotTables
from fairfold.protocol.fleet import Fleet
from fairfold.protocol.people import ImagePeople, People
from fairfold.protocol.words import Visit, Word
from fairfold.protocol.work import as_input

if TYPE_CHECKING:
    from fairfold.kernels.gpu.affine import Link

CLIENTS_AT_ONCE = 32
STEPS_AT_ONCE = 8
"""Steps that one recorded program takes: the start of a program costs more than that of a kernel inside it."""
ROUNDS_AHEAD = 2


def chain_of(names: Sequence[str], parts: Mapping[str, Part]) -> "list[Link]":
    """Layers one after the other; empty if one of them is the sum of a whole layer and of factors."""
    from fairfold.kernels.gpu.affine import Link

    chain = []
    for number, name in enumerate(names):
        weight, bias, last = f"{name}.weight", parts[f"{name}.bias"], number == len(names) - 1
        factors = [] if weight + LEFT not in parts else [parts[weight + RIGHT], parts[weight + LEFT]]
        if factors and weight in parts:
            return []
        *before, end = factors or [parts[weight]]
        chain += [Link(part.values, part.slopes, None, None, rectify=False) for part in before]
        chain.append(Link(end.values, end.slopes, bias.values, bias.slopes, rectify=not last))
    return chain


class ImageGraphBackend:
    """Runs the rounds of one fleet; holds the buffers and, on a GPU, the captured steps."""

    def __init__(self, fleet: Fleet, people: ImagePeople, device: torch.device) -> None:
        work, steps = people.work, people.work.steps
        self.fleet, self.people, self.work, self.steps, self.device = fleet, people, work, steps, device
        self.lines = Lines(fleet.plan)
        self._positions: dict[int, Tensor] = {}
        self._tables: dict[int, SlotTables] = {}
        clients = min(fleet.plan.settings.fleet.clients_per_round or people.num_clients, CLIENTS_AT_ONCE)
        biggest = max(people.samples(client) for client in fleet.taking_part.tolist())
        self._steps = -(-biggest // steps.batch_size) * steps.local_epochs
        kind = torch.get_default_dtype()

        def make(*shape: int, of: torch.dtype = kind) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        plan = self.lines
        self._full, self._gradient = make(clients, plan.coordinates), make(clients, plan.coordinates)
        self._values = make(clients, plan.slots)
        self._moments = [make(clients, plan.slots) for _ in range(MOMENTS[steps.local_optimiser])]
        self._lists = SlotTables.empty(clients, plan.slots // plan.width, plan.coordinates, plan.width, device)
        self._rows = make(self._steps, clients, steps.batch_size, of=torch.int32)
        self._shares = make(self._steps, clients, steps.batch_size)
        self._step = make(1, of=torch.int64)
        self._rates = step_sizes(steps, self._steps).to(device, kind)
        train = work.images.train
        self._pixels = as_input(train.images.to(device), work.seen).flatten(1)
        self._labels = train.labels.to(device)
        self._wanted = torch.nn.functional.one_hot(train.labels, work.images.num_classes).to(device, kind)
        self._networks: dict[int, torch.nn.Module] = {}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._draws = Ahead(self._draw, fleet.plan.settings.run.rounds, ROUNDS_AHEAD)

    def __call__(self, people: People, visits: Iterable[Visit], alone: Mapping[int, str]) -> Iterator[Word]:  # noqa: ARG002
        """See :data:`fairfold.protocol.round.Backend`."""
        assert people is self.people
        if getattr(self.fleet.plan.method, "rehash", False):
            self._tables.clear()
        coming = iter(visits)
        while some := list(islice(coming, len(self._full))):
            yield from self._train_some(some, self._draws.of_round(some[0].sent.round_number))

    def _train_some(self, visits: list[Visit], batches: dict[int, Tensor]) -> Iterator[Word]:
        """Train these together, those with most steps first."""
        placed = sorted(range(len(visits)), key=lambda index: -len(batches[visits[index].client]))
        for place, index in enumerate(placed):
            visit = visits[index]
            sent = torch.cat([visit.sent.vectors[name] for name in visit.sent.projections]).to(self.device)
            self._values[place].zero_().index_copy_(0, self._positions_of(visit), sent)
            self._lists.put(place, self._table_of(visit))
        drawn = [batches[visits[index].client] for index in placed]
        self._fill(drawn)
        for moment in self._moments:
            moment.zero_()
        self._step.zero_()
        self._gradient.zero_()
        count = len(visits)
        self._update(count)  # with no gradient nothing moves: it only recovers the weights
        done = 0
        for working in range(count, 0, -1):  # until the last of these has no more batches
            steps = len(drawn[working - 1])
            self._run(working, steps - done)
            done = steps
        self._draws.after(visits[0].sent.round_number)
        place_of = {index: place for place, index in enumerate(placed)}
        kept = [self._values[place_of[index]][self._positions_of(visit)] for index, visit in enumerate(visits)]
        trained = torch.split(torch.cat(kept).cpu(), [len(vector) for vector in kept])
        for visit, mine in zip(visits, trained, strict=True):
            projections = visit.sent.projections
            sizes = [projection.size for projection in projections.values()]
            vectors = dict(zip(projections, torch.split(mine, sizes), strict=True))
            yield trained_word(self.fleet.plan.algorithm, visit, vectors, self.people.samples(visit.client))

    def _positions_of(self, visit: Visit) -> Tensor:
        group = visit.sent.size
        if group not in self._positions:
            self._positions[group] = self.lines.positions(visit.sent.projections).to(self.device)
        return self._positions[group]

    def _table_of(self, visit: Visit) -> SlotTables:
        """Made once a size, or once a client whose hash is its own; anew where hashes change with the round."""
        key = visit.client if self.fleet.plan.method.per_client else visit.sent.size
        if key not in self._tables:
            self._tables[key] = self.lines.table(visit.sent.projections, self.device)
        return self._tables[key]

    def _draw(self, number: int) -> dict[int, Tensor]:
        """As the readable loop draws them, the batches of every client: int32 [steps, batch].

        Where the last batch of an epoch is not full it is filled up with -1.
        """
        size, found = self.steps.batch_size, {}
        for client in self.fleet.ranks.mine(self.fleet.cohort(number).tolist()):
            orders = torch.stack(self.work.orders(client, self.people.source(number, client)))
            padded = torch.nn.functional.pad(orders.to(torch.int32), (0, -orders.shape[1] % size), value=-1)
            found[client] = padded.view(-1, size)
        return found

    def _fill(self, batches: list[Tensor]) -> None:
        """Set up the batches of a round; what fills one up is an image whose share in the loss is 0."""
        steps, clients = len(batches[0]), len(batches)
        rows = torch.full((steps, clients, self.steps.batch_size), -1, dtype=torch.int32)
        for place, of_client in enumerate(batches):
            rows[: len(of_client), place] = of_client
        found = rows.to(self.device)
        real = found >= 0
        self._rows[:steps, :clients] = found.clamp_(min=0)
        self._shares[:steps, :clients] = real / real.sum(2, keepdim=True).clamp_(min=1)

    def _run(self, working: int, steps: int) -> None:
        """The next steps of the first clients."""
        if self.device.type != "cuda":
            self._take_steps(working, steps)
            return
        changed = [self._full, self._gradient, self._values, *self._moments, self._step]
        for many in [STEPS_AT_ONCE] * (steps // STEPS_AT_ONCE) + [1] * (steps % STEPS_AT_ONCE):
            if (working, many) not in self._graphs:
                take = partial(self._take_steps, working, many)
                self._graphs[working, many] = capture(take, changed, self._pool)
            self._graphs[working, many].replay()

    def _take_steps(self, working: int, many: int) -> None:
        for _ in range(many):
            self._take_step(working)

    def _take_step(self, working: int) -> None:
        """Forward, backward and update of the first clients, all at once."""
        if chain := self._chain(working):
            from fairfold.kernels.gpu.affine import Batches, chain_slopes  # needs Triton, so only where it is there

            chain_slopes(chain, Batches(self._pixels, self._labels, self._rows, self._shares, self._step))
        else:
            self._slopes(working)
        self._update(working)
        self._step += 1

    def _slopes(self, working: int) -> None:
        """Gradients by torch, for any network."""
        network = self._network(working)
        rows = self._rows[:, :working].index_select(0, self._step).view(-1)
        shares = self._shares[:, :working].index_select(0, self._step).view(-1, 1)
        with torch.enable_grad():
            logits = network(self._pixels.index_select(0, rows))
        # The gradient of the cross-entropy, its mean over a batch: (softmax - wanted) / size.
        slope = torch.softmax(logits.detach(), 1).sub_(self._wanted.index_select(0, rows)).mul_(shares)
        with torch.autograd.set_multithreading_enabled(False):  # here, where the stream being captured is current
            torch.autograd.backward(logits, slope)

    def _update(self, working: int) -> None:
        ops.step_slots(
            self._full[:working], self._gradient[:working], self._values, self._moments, self._lists,
            self._rates, self._step,
        )  # fmt: skip

    def _chain(self, working: int) -> "list[Link]":
        """The network as a chain of linear layers, for our own kernels (float32, on a GPU); empty where it is none."""
        names: tuple[str, ...] = getattr(self.work.architecture.network, "chain", ())
        if not (names and self.device.type == "cuda" and self._full.dtype == torch.float32):
            return []
        return chain_of(names, self._parts(working))

    def _parts(self, working: int) -> dict[str, Part]:
        parts = {}
        for name, (at, shape) in self.lines.parts.items():
            line = slice(at, at + prod(shape))
            views = [of[:working, line].view(working, *shape) for of in (self._full, self._gradient)]
            parts[name] = Part(*views)
        return parts

    def _network(self, working: int) -> torch.nn.Module:
        if working not in self._networks:
            parts = self._parts(working)
            self._networks[working] = stacked_network(self.work.architecture.empty_network(), parts)
        return self._networks[working]
