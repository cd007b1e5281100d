"""The batched backend: the updates of ``sequential`` at the cost of what clients touch, plus one pass over the model.

*The active set is exact* (:mod:`.active_set`): only the slots that a client touches are gathered, trained and sent
back. *Sizes are data, not shapes*: clients of all sizes and methods run through one program, compiled (a client per
thread) or under autograd (in lockstep). *Updates are additive*: changes are summed in the compact space of each size.

:func:`choose_backend` takes it for every run that does not ask for another, or for a GPU.
"""

import math
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor

from fairfold.algorithms.gradient import GradientAlgorithm
from fairfold.backends import active_set, images
from fairfold.backends.active_set import ActiveSet
from fairfold.errors import InvalidSettings
from fairfold.federation.algorithm import BatchedUpdates, TrainsImages
from fairfold.federation.clients import Clients, ImageClients
from fairfold.federation.plan import Plan
from fairfold.federation.round import Backend, Scheduled, Separate, Updates, sequential
from fairfold.federation.scheduling import ClientSampler
from fairfold.federation.updates import ClientTask, ClientUpdate, ScheduledTask, Update
from fairfold.kernels import gpu
from fairfold.kernels.native import loader
from fairfold.subspace.blocks import LowRank
from fairfold.subspace.projection import Coordinatewise
from fairfold.subspace.stored_table import StoredTable

CLIENTS_AT_ONCE = 16
"""Clients trained together: enough to hide the cost of a call; memory does not grow with the cohort."""

Member = TypeVar("Member", int, ScheduledTask)


def supports_gpu(plan: Plan) -> bool:
    """Whether rounds of this plan can run on a GPU."""
    algorithm = plan.algorithm
    batched_steps = supports_batched_training(plan) and isinstance(algorithm, GradientAlgorithm) and not algorithm.prox
    synchronous = plan.settings.fleet.asynchronous.is_synchronous  # else updates of a round start from different models
    run = plan.settings.run
    return batched_steps and synchronous and run.backend == "batched" and run.table_storage == "memory"


def choose_device(plan: Plan) -> torch.device:
    """The torch device that a run trains on: ``run.device``, where ``"auto"`` takes a GPU that can be used."""
    supported, wanted = supports_gpu(plan), plan.settings.run.device
    if wanted == "cuda" and not supported:
        needed = "a built-in model, run.backend='batched', gradient steps, prox=0, no fleet.asynchronous"
        remedy = "Use run.device='auto', which takes a GPU where it can be used."
        raise InvalidSettings("run.device='cuda' with settings that run on the CPU only", needed, remedy)
    if wanted == "cuda" and not gpu.available():
        given = "run.device='cuda' where torch has no GPU, or Triton is missing"
        raise InvalidSettings(given, "an NVIDIA GPU and Triton", "See fairfold doctor, or use run.device='cpu'.")
    return torch.device("cuda" if supported and wanted != "cpu" and gpu.available() else "cpu")


def choose_backend(sampler: ClientSampler, clients: Clients, device: torch.device) -> Backend:
    """The backend that computes the client updates of a run: ``run.backend``, on this device."""
    if sampler.plan.settings.run.backend == "sequential":
        return sequential
    if device.type != "cuda":
        return batched
    from fairfold.backends.cuda_graph import GraphBackend  # here, as both take helpers from this module
    from fairfold.backends.image_graph import ImageGraphBackend

    if isinstance(clients, ImageClients):
        return ImageGraphBackend(sampler, clients, device)
    return GraphBackend(sampler, clients, device)


def batched(clients: Clients, scheduled: Scheduled, separate: Separate) -> Updates:
    """Compute client updates by batched gradient steps, by the algorithm's own batched way, or sequentially."""
    algorithm = clients.plan.algorithm
    if not supports_batched_training(clients.plan):
        return _by_algorithm(clients, scheduled, separate)
    assert isinstance(algorithm, GradientAlgorithm)
    if isinstance(algorithm, TrainsImages):
        return images.client_updates(clients, scheduled, separate)
    return _by_gradient_steps(clients, algorithm, scheduled, separate)


def supports_batched_training(plan: Plan) -> bool:
    """Whether local training is gradient steps that the programs of this package can take.

    Excluded are custom models, which need not work under ``vmap``, dropout, whose draws are a client's own, and FedProx
    where tables are products: the norm of a product is no sum over its factors.
    """
    algorithm = plan.algorithm
    if not isinstance(algorithm, GradientAlgorithm) or not algorithm.has_standard_training:
        return False
    if isinstance(algorithm, TrainsImages):
        return not algorithm.prox
    projections = [each for assignment in plan.assignments(0) for each in (assignment.projections or {}).values()]
    model = plan.settings.model
    if model.is_custom or model.dropout or not all(isinstance(each, Coordinatewise | LowRank) for each in projections):
        return False
    return not algorithm.prox or all(projection.linear for projection in projections)


def distinct_batches(cohort: Iterable[Member], size: int) -> Iterator[list[Member]]:
    """Batches of clients (or their tasks) in which no client occurs twice: its second task starts after its first."""
    batch: dict[int, Member] = {}
    for member in cohort:
        client = member.client if isinstance(member, ScheduledTask) else member
        if client in batch or len(batch) == size:
            yield list(batch.values())
            batch = {}
        batch[client] = member
    if batch:
        yield list(batch.values())


def _by_algorithm(clients: Clients, scheduled: Scheduled, separate: Separate) -> Updates:
    """Updates by the algorithm's ``client_updates`` where it has one; separate clients sequentially."""
    plan, tasks = clients.plan, list(scheduled)
    together = [each for each in tasks if each.client not in separate]
    if together and isinstance(plan.algorithm, BatchedUpdates):
        yield from plan.algorithm.client_updates(plan, clients, together)
    else:
        yield from sequential(clients, together, separate)
    yield from sequential(clients, [each for each in tasks if each.client in separate], separate)


def _by_gradient_steps(
    clients: Clients, algorithm: GradientAlgorithm, scheduled: Scheduled, separate: Separate
) -> Updates:
    """Updates by gradient steps on active sets, valid ones summed by size as they come."""
    sums = _SizeSums(clients, algorithm)
    with ThreadPoolExecutor(loader.workers(), initializer=loader.use_single_thread) as workers:
        for batch in distinct_batches(scheduled, CLIENTS_AT_ONCE):
            for trained in _train(clients, batch, workers):
                if trained.client in separate or not sums.add(trained):
                    yield _client_update(clients, algorithm, trained)
                    continue
                for name in clients.local_state:  # stored now: a client that is drawn again goes on from here
                    clients.local_state[name][trained.client] = trained.values[trained.sections[name]]
    yield from sums.client_updates()


def _train(clients: Clients, scheduled: list[ScheduledTask], workers: ThreadPoolExecutor) -> Iterator[ActiveSet]:
    """The trained clients in their order: by compiled code, a client per thread, else all in lockstep."""

    def train(scheduled_task: ScheduledTask) -> tuple[ActiveSet, bool]:
        active = active_set.gather(clients, scheduled_task)
        return active, active_set.train_compiled(active, clients.training)

    results = list(workers.map(train, scheduled))
    active_set.train_lockstep([active for active, done in results if not done], clients.training)
    return (active for active, _ in results)


def _client_update(clients: Clients, algorithm: GradientAlgorithm, trained: ActiveSet) -> ClientUpdate:
    """The whole update of one client, untouched slots included."""
    weight = algorithm.weight(clients.num_samples(trained.client))
    change, sums = trained.values - trained.start, {}
    for name, vector in trained.task.vectors.items():
        moved = change[trained.sections[name]]
        if isinstance(vector, StoredTable):
            sums[name] = vector.sparse(trained.slots[name], moved * weight)
            continue
        start = vector if algorithm.sends_weights else torch.zeros_like(vector)
        sums[name] = start.index_add(0, trained.slots[name], moved) * weight
    own = {name: trained.values[trained.sections[name]] for name in clients.local_state}
    return ClientUpdate(trained.task, [trained.client], Update(sums, weight), own)


class _SizeSums:
    """The changes of a round's clients, summed in the compact space of each size."""

    def __init__(self, clients: Clients, algorithm: GradientAlgorithm) -> None:
        self._clients, self._algorithm = clients, algorithm
        self._sums: dict[int, tuple[ClientTask, Update, list[int]]] = {}
        self._touched: dict[int, dict[str, tuple[list[Tensor], list[Tensor]]]] = {}  # of tables on disk: sparse sums

    def add(self, trained: ActiveSet) -> bool:
        """Add one trained client; False if its update is not valid, or not additive in its compact space."""
        task = trained.task
        if not all(projection.linear for projection in task.projections.values()):
            return False
        change = trained.values - trained.start
        changes = {name: change[trained.sections[name]] for name in trained.slots}
        for vector in changes.values():
            if vector.numel():
                low, high = (float(end) for end in torch.aminmax(vector))  # NaN, if there is one, is both
                if not (math.isfinite(low) and max(high, -low) <= self._algorithm.max_change):
                    return False
        weight = self._algorithm.weight(self._clients.num_samples(trained.client))
        if id(task) not in self._sums:
            on_disk = {name: vector for name, vector in task.vectors.items() if isinstance(vector, StoredTable)}
            empty = {name: torch.zeros_like(vector) for name, vector in task.vectors.items() if name not in on_disk}
            self._sums[id(task)] = (task, Update(empty, 0.0), [])
            self._touched[id(task)] = {name: ([], []) for name in on_disk}
        _, update, client_ids = self._sums[id(task)]
        touched = self._touched[id(task)]
        for name, vector in changes.items():
            if name in touched:
                touched[name][0].append(trained.slots[name])
                touched[name][1].append(vector * weight)
                continue
            update.sums[name].index_add_(0, trained.slots[name], vector, alpha=weight)
        client_ids.append(trained.client)
        self._sums[id(task)] = (task, Update(update.sums, update.weight + weight), client_ids)
        return True

    def client_updates(self) -> Updates:
        """One update per size; the local state of its clients is stored already."""
        for task, update, client_ids in self._sums.values():
            for name, (slots, values) in self._touched[id(task)].items():
                table = task.vectors[name]
                assert isinstance(table, StoredTable)
                update.sums[name] = table.sparse(torch.cat(slots), torch.cat(values))
            if self._algorithm.sends_weights:
                for name, total in update.sums.items():
                    total.add_(task.vectors[name], alpha=update.weight)
            yield ClientUpdate(task, client_ids, update, {})
