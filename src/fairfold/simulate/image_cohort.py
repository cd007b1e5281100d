"""A cohort of image devices trained as one program; on a GPU its steps are captured once and replayed.

Every client's weights stand realised in one line of a matrix. A step is forward and backward of all networks at once
(:mod:`.stacked`), then one pass over the slots of what the clients hold: gradients are added up, the optimiser moves
the slots, and the weights are brought up to date (:func:`fairfold.kernels.ops.step_slots`). Methods differ by data
alone: which weights live in which slot, and which a client does not have. All sums have a fixed order.

Clients stand in the order of their number of steps, so those still at work are the first ones; there is one recorded
program for every number of them. The server's part of the round is that of :mod:`.loop`.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import islice
from math import prod
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from fairfold.federation.aggregate import ServerState
from fairfold.federation.image_task import ImageTask
from fairfold.federation.replies import Rejections
from fairfold.federation.sampling import Purpose, generator
from fairfold.federation.settings import Settings
from fairfold.federation.task import Weights
from fairfold.federation.train import Trained
from fairfold.kernels import ops
from fairfold.kernels.reference_stacked import SlotTables
from fairfold.simulate import loop
from fairfold.simulate.captured import capture, step_sizes
from fairfold.simulate.federation import Federation
from fairfold.simulate.image_plan import Plan
from fairfold.simulate.loop import Visit
from fairfold.simulate.stacked import LEFT, RIGHT, Part, stacked_network

if TYPE_CHECKING:
    from fairfold.kernels.gpu.affine import Link

CLIENTS_AT_ONCE = 32
STEPS_AT_ONCE = 8
"""Steps that one recorded program takes: the start of a program costs more than that of a kernel inside it."""
ROUNDS_AHEAD = 2
USE_CHAIN = True
"""Whether networks that are chains of linear layers run by kernels of our own, in float32 on a GPU."""


def serves(settings: Settings) -> bool:
    """Whether a round of these settings can run here."""
    return (
        settings.reads_images and settings.solver == "gradient" and not settings.prox and settings.method != "central"
    )


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


class ImageCohorts:
    """Runs the rounds of one federation; holds the buffers and, on a GPU, the captured steps."""

    def __init__(self, federation: Federation, device: torch.device) -> None:
        task, settings = federation.task, federation.settings
        assert isinstance(task, ImageTask)
        self.federation, self.task, self.settings, self.device = federation, task, settings, device
        self.plan = Plan(federation)
        self._positions: dict[int, Tensor] = {}
        self._tables: dict[int, SlotTables] = {}
        clients = min(settings.clients_per_round or task.num_clients, CLIENTS_AT_ONCE)
        biggest = max(task.samples(client) for client in federation.taking_part.tolist())
        self._steps = -(-biggest // settings.batch_size) * settings.local_epochs
        kind = torch.get_default_dtype()

        def make(*shape: int, of: torch.dtype = kind) -> Tensor:
            return torch.zeros(shape, dtype=of, device=device)

        plan = self.plan
        self._full, self._gradient = make(clients, plan.coordinates), make(clients, plan.coordinates)
        self._values = make(clients, plan.slots)
        self._moments = [
            make(clients, plan.slots) for _ in range({"sgd": 0, "adagrad": 1, "adam": 2}[settings.local_optimiser])
        ]
        self._lists = SlotTables.empty(clients, plan.slots // plan.width, plan.coordinates, plan.width, device)
        self._rows = make(self._steps, clients, settings.batch_size, of=torch.int32)
        self._shares = make(self._steps, clients, settings.batch_size)
        self._step = make(1, of=torch.int64)
        self._rates = step_sizes(settings, self._steps).to(device, kind)
        train = task.images.train
        self._pixels = task.as_input(train.images.to(device)).flatten(1)
        self._labels = train.labels.to(device)
        self._wanted = torch.nn.functional.one_hot(train.labels, task.images.num_classes).to(device, kind)
        self._networks: dict[int, torch.nn.Module] = {}
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool = torch.cuda.graph_pool_handle() if device.type == "cuda" else None
        self._feeder = ThreadPoolExecutor(ROUNDS_AHEAD, thread_name_prefix="fairfold-images")
        self._ahead: dict[int, Future[dict[int, Tensor]]] = {}

    def run_round(self, state: ServerState, private: Weights, rejections: Rejections) -> ServerState:
        """One round; see :func:`fairfold.simulate.loop.run_round`."""
        if self.settings.rehash:
            self._tables.clear()
        batches = self._drawn(state.round_number)

        def train(visits: Iterable[Visit]) -> Iterator[tuple[Visit, Trained]]:
            coming = iter(visits)
            while some := list(islice(coming, len(self._full))):
                yield from self._train_some(some, batches)

        return loop.run_round(state, private, self.federation, rejections, train)

    def _train_some(self, visits: list[Visit], batches: dict[int, Tensor]) -> Iterator[tuple[Visit, Trained]]:
        """Train these together, those with most steps first."""
        placed = sorted(range(len(visits)), key=lambda index: -len(batches[visits[index].device.client]))
        for place, index in enumerate(placed):
            self._values[place] = self._line_of(visits[index])
            self._lists.put(place, self._table_of(visits[index]))
        drawn = [batches[visits[index].device.client] for index in placed]
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
        place_of = {index: place for place, index in enumerate(placed)}
        kept = [self._values[place_of[index]][self._positions_of(visit)] for index, visit in enumerate(visits)]
        trained = torch.split(torch.cat(kept).cpu(), [len(vector) for vector in kept])
        for visit, mine in zip(visits, trained, strict=True):
            projections = visit.device.projections
            sizes = [projection.size for projection in projections.values()]
            yield visit, Trained(dict(zip(projections, torch.split(mine, sizes), strict=True)), {})

    def _line_of(self, visit: Visit) -> Tensor:
        """What a client received, as its line of slots."""
        sent = torch.cat([visit.received[name] for name in visit.device.projections]).to(self.device)
        return torch.zeros_like(self._values[0]).index_copy_(0, self._positions_of(visit), sent)

    def _positions_of(self, visit: Visit) -> Tensor:
        group = int(self.federation.group[visit.device.client])
        if group not in self._positions:
            self._positions[group] = self.plan.positions(visit.device.projections).to(self.device)
        return self._positions[group]

    def _table_of(self, visit: Visit) -> SlotTables:
        """Made once a size, or once a client whose hash is its own; anew where hashes change with the round."""
        client = visit.device.client
        key = client if self.settings.method == "inconsistent" else int(self.federation.group[client])
        if key not in self._tables:
            self._tables[key] = self.plan.table(visit.device.projections, self.device)
        return self._tables[key]

    def _drawn(self, number: int) -> dict[int, Tensor]:
        """Every client's batches; those of the next rounds are drawn while this one runs."""
        coming = range(number, min(number + ROUNDS_AHEAD, self.settings.rounds - 1) + 1)
        self._ahead = {
            each: self._ahead.get(each) or self._feeder.submit(self._draw, each) for each in {number, *coming}
        }
        return self._ahead[number].result()

    def _draw(self, number: int) -> dict[int, Tensor]:
        """As the readable loop draws them: the batches of every client."""
        return {
            client: self._batches(torch.stack(self.task.orders(client, self._source(number, client))))
            for client in self.federation.cohort(number).tolist()
        }

    def _source(self, number: int, client: int) -> torch.Generator:
        return generator(self.settings, Purpose.TRAINING, number, client)

    def _batches(self, orders: Tensor) -> Tensor:
        """Images by step, int32 [steps, batch], from those of each epoch; -1 where the last of an epoch is not full."""
        size = self.settings.batch_size
        padded = torch.nn.functional.pad(orders.to(torch.int32), (0, -orders.shape[1] % size), value=-1)
        return padded.view(-1, size)

    def _fill(self, batches: list[Tensor]) -> None:
        """Set up the batches of a round; what fills one up is an image whose share in the loss is 0."""
        steps, clients = len(batches[0]), len(batches)
        rows = torch.full((steps, clients, self.settings.batch_size), -1, dtype=torch.int32)
        for place, of_client in enumerate(batches):
            rows[: len(of_client), place] = of_client
        found = rows.to(self.device)
        real = found >= 0
        self._rows[:steps, :clients] = found.clamp_(min=0)
        self._shares[:steps, :clients] = real / real.sum(2, keepdim=True).clamp_(min=1)

    def _run(self, working: int, steps: int) -> None:
        """The next steps of the first clients."""
        if self.device.type != "cuda":
            for _ in range(steps):
                self._take_step(working)
            return
        for many in [STEPS_AT_ONCE] * (steps // STEPS_AT_ONCE) + [1] * (steps % STEPS_AT_ONCE):
            if (working, many) not in self._graphs:
                self._graphs[working, many] = capture(
                    partial(self._take_steps, working, many), self._changed(), self._pool
                )
            self._graphs[working, many].replay()

    def _changed(self) -> list[Tensor]:
        return [self._full, self._gradient, self._values, *self._moments, self._step]

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
        """The network as a chain of linear layers, for kernels of our own; empty where it is none."""
        names: tuple[str, ...] = getattr(self.task.network, "chain", ())
        if not (USE_CHAIN and names and self.device.type == "cuda" and self._full.dtype == torch.float32):
            return []
        return chain_of(names, self._parts(working))

    def _parts(self, working: int) -> dict[str, Part]:
        parts = {}
        for name, (at, shape) in self.plan.parts.items():
            line = slice(at, at + prod(shape))
            views = [of[:working, line].view(working, *shape) for of in (self._full, self._gradient)]
            parts[name] = Part(*views)
        return parts

    def _network(self, working: int) -> torch.nn.Module:
        if working not in self._networks:
            parts = self._parts(working)
            self._networks[working] = stacked_network(self.task.empty_network(), parts)
        return self._networks[working]
