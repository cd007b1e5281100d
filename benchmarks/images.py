"""One round of the paper's experiment on images: the readable loop, a stacked cohort and fairfold, in one run.

    FAIRFOLD_DATA=... python benchmarks/images.py [--model mlp] [--method fair] [--capacities 2x-4x] [--epochs 1]
                                                  [--batch 64] [--repeats 3] [--hardware NAME --out FILE.csv]

30 devices by Dirichlet shares, K = 10. *loop* is one device after the other. *stacked* trains all clients of the cohort
in one program: weights stacked along a first dimension, ``torch.func.vmap`` over them, fused updates. *fairfold* is the
batched backend. Time grows with the epochs, so one is enough to compare; the last line says what 20 epochs of 200
rounds take. All three must end with the same weights. Seconds are those the process had the processor for (others may
be at work beside it); the smallest of the repeats counts.
"""

import argparse
import csv
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.func import functional_call, vmap
from torch.nn import functional

from fairfold.backends.batched import batched
from fairfold.config import read_settings
from fairfold.data import load_images
from fairfold.federation.clients import ImageClients
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import Backend, run_round, sequential
from fairfold.federation.training import ImageTraining, LocalOptimizer
from fairfold.federation.updates import Aggregate, State, Update
from fairfold.kernels import ops
from fairfold.subspace.projection import Hashed, Projection
from fairfold.typing import Weights


def stacked_round(state: State, world: Federation) -> State:
    """The whole cohort as one program; hashed projections only."""
    clients = world.clients
    assert isinstance(clients, ImageClients)
    work = clients.training
    drawn = []
    for scheduled_task in world.sampler.schedule(state, world.sampler.cohort(state.round_number).tolist()):
        source = clients.source(state.round_number, scheduled_task.client)
        drawn.append((scheduled_task, scheduled_task.task.projections, work.batches(scheduled_task.client, source)))
    drawn.sort(key=lambda one: -len(one[2]))  # those still at work are then always a prefix
    compacts = [
        {name: vector.clone() for name, vector in scheduled_task.task.vectors.items()} for scheduled_task, _, _ in drawn
    ]
    vectors = [vector for one in compacts for vector in one.values()]
    optimizers, losses = [LocalOptimizer(vector, work.steps) for vector in vectors], vmap(partial(image_losses, work))
    full = {name: torch.empty(len(drawn), *tensor.shape) for name, tensor in state.full.items()}
    for step in range(len(drawn[0][2])):
        batches = [batches[step] for _, _, batches in drawn if len(batches) > step]
        moving = len(batches)
        for place in range(moving):
            for name, projection in drawn[place][1].items():
                _recover(projection, compacts[place][name], full[name][place])
        sizes = torch.tensor([len(batch) for batch in batches])
        rows = torch.stack([_padded(batch.items, int(sizes.max())) for batch in batches])
        weights = {name: stack[:moving].detach().requires_grad_() for name, stack in full.items()}
        found = losses(weights, work.pixels(rows), work.images.train.labels[rows])
        real = torch.arange(rows.shape[1]) < sizes[:, None]
        loss = (torch.where(real, found, 0).sum(1) / sizes).sum()
        slopes = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
        gradients = []
        for place, (_, held, _) in enumerate(drawn):
            for name, vector in compacts[place].items():
                into = torch.zeros_like(vector)
                if place < moving:
                    _accumulate(held[name], slopes[name][place], into)
                gradients.append(into)
        count = moving * len(full)
        for optimizer, gradient in zip(optimizers[:count], gradients, strict=False):
            optimizer.step(gradient, gradient.numel())
    aggregate = Aggregate()
    for (scheduled_task, _, _), trained in zip(drawn, compacts, strict=True):
        weight = float(clients.num_samples(scheduled_task.client))
        aggregate.add(scheduled_task.task, Update({name: vector * weight for name, vector in trained.items()}, weight))
    return world.plan.algorithm.server_update(world.plan, state, aggregate)


def image_losses(work: ImageTraining, dense: Weights, pixels: Tensor, labels: Tensor) -> Tensor:
    """The cross-entropy of every image."""
    logits: Tensor = functional_call(work.architecture.network, work.architecture.in_shape(dense), (pixels,))
    return functional.cross_entropy(logits, labels, reduction="none")


def _recover(projection: Projection, compact: Tensor, out: Tensor) -> None:
    assert isinstance(projection, Hashed)
    if projection.subspace.is_full:
        out.copy_(compact)
    else:
        ops.recover_range(projection.subspace.layout, compact, 0, out)


def _accumulate(projection: Projection, slope: Tensor, into: Tensor) -> None:
    assert isinstance(projection, Hashed)
    if projection.subspace.is_full:
        into.copy_(slope)
    else:
        ops.accumulate_range(projection.subspace.layout, slope, 0, into)


def _padded(rows: Tensor, length: int) -> Tensor:
    return torch.cat([rows, rows[:1].expand(length - len(rows))])


def smallest(call: Callable[[], State], repeats: int) -> tuple[float, Weights]:
    found, state = [], None
    for _ in range(repeats):
        started = time.process_time()
        state = call()
        found.append(time.process_time() - started)
    assert state is not None
    return min(found), state.full


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist")
    parser.add_argument("--model", default="mlp", choices=["mlp", "lenet"])
    parser.add_argument("--method", default="fair")
    parser.add_argument("--capacities", default="2x-4x")
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--hardware", default="unnamed")
    parser.add_argument("--out", type=Path, help="append the figures to this CSV")
    given = parser.parse_args()
    settings = read_settings({
        "data": {"name": given.data}, "model": {"kind": given.model}, "subspace": {"method": given.method},
        "fleet": {"capacities": given.capacities},
        "algorithm": {
            "kind": "images", "local_epochs": given.epochs, "batch_size": given.batch, "local_optimizer": "sgd",
            "local_lr": 0.1,
        },
    })  # fmt: skip
    world = Federation.of(settings, load_images(given.data))
    state = world.initial()

    def by(backend: Backend) -> Callable[[], State]:
        return lambda: run_round(state, world.sampler, world.clients, Rejections(), backend)

    ways: dict[str, Callable[[], State]] = {
        "fairfold": by(batched),
        "loop": by(sequential),
    }
    if given.method in ("fair", "fair_hom", "fedavg", "full_trn"):
        ways["stacked"] = lambda: stacked_round(state, world)
    cohort = world.sampler.cohort(0).tolist()
    images = sum(world.clients.num_samples(client) for client in cohort) * given.epochs
    print(f"{given.model}, {given.method} {given.capacities}: {len(cohort)} clients, {images:,} images a round")
    seconds, ends = {}, {}
    for name, call in ways.items():
        seconds[name], ends[name] = smallest(call, given.repeats)
        each = seconds[name] / images * 1e6
        print(f"  {name:9s} {seconds[name]:7.3f} s, {each:6.1f} µs an image", flush=True)
    for name in list(ways)[1:]:
        apart = max(float((ends[name][key] - tensor).abs().max()) for key, tensor in ends["fairfold"].items())
        ratio = seconds[name] / seconds["fairfold"]
        print(f"  fairfold is {ratio:.2f} x as fast as {name}; weights differ by at most {apart:.0e}")
    whole = seconds["fairfold"] / given.epochs * 20 * 200 / 60
    print(f"  20 epochs, 200 rounds of such cohorts: {whole:.0f} minutes")
    if given.out:
        new = not given.out.exists()
        with given.out.open("a", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            if new:
                writer.writerow(["model", "method", "capacities", "batch", "images", "way", "seconds", "hardware"])
            for name, value in seconds.items():
                row = [given.model, given.method, given.capacities, given.batch, images, name, f"{value:.4f}"]
                writer.writerow([*row, given.hardware])


if __name__ == "__main__":
    main()
