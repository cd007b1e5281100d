"""One round of the paper's experiment on images: the readable loop, a stacked cohort and fairfold, in one run.

    FAIRFOLD_DATA=... python benchmarks/images.py [--model mlp] [--method fair] [--capacities 2x-4x] [--epochs 1]
                                                  [--batch 64] [--repeats 3] [--hardware NAME --out FILE.csv]

30 devices by Dirichlet shares, K = 10. *loop* is ``simulate/loop.py``. *stacked* trains all clients of the cohort in
one program: weights stacked along a first dimension, ``torch.func.vmap`` over them, fused updates. *fairfold* is the
batched backend. Time grows with the epochs, so one is enough to compare; the last line says what 20 epochs of 200
rounds take. All three must end with the same weights. Seconds are those the process had the processor for (others may
be at work beside it); the smallest of the repeats counts.
"""

import argparse
import csv
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.func import vmap

from fairfold.data import load_images
from fairfold.federation.aggregate import RoundTotals, ServerState, aggregate
from fairfold.federation.image_task import ImageTask
from fairfold.federation.projection import Hashed, Projection
from fairfold.federation.replies import Rejections
from fairfold.federation.sampling import Purpose, generator, sample_cohort
from fairfold.federation.send import send
from fairfold.federation.settings import read_settings
from fairfold.federation.task import Weights
from fairfold.kernels import ops
from fairfold.simulate import batched, loop
from fairfold.simulate.federation import Federation
from fairfold.simulate.steps import LocalSteps


def stacked_round(state: ServerState, federation: Federation) -> ServerState:
    """The whole cohort as one program; hashed projections only."""
    settings, task = federation.settings, federation.task
    assert isinstance(task, ImageTask)
    assignments = federation.assignments(state.round_number)
    sent = send(state.full, assignments)
    drawn = []
    for client in sample_cohort(settings, task.num_clients, state.round_number).tolist():
        held = assignments[int(federation.group[client])].projections
        if held is not None:
            source = generator(settings, Purpose.TRAINING, state.round_number, client)
            drawn.append((client, held, task.batches(client, source)))
    drawn.sort(key=lambda one: -len(one[2]))  # those still at work are then always a prefix
    compacts = [
        {name: vector.clone() for name, vector in (sent[int(federation.group[client])] or {}).items()}
        for client, _, _ in drawn
    ]
    vectors = [vector for one in compacts for vector in one.values()]
    optimisers, losses = [LocalSteps(vector, settings) for vector in vectors], vmap(task.image_losses)
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
        found = losses(weights, task.pixels(rows), task.images.train.labels[rows])
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
        for optimiser, gradient in zip(optimisers[:count], gradients, strict=False):
            optimiser.step(gradient, gradient.numel())
    totals = RoundTotals(state.full)
    for (client, held, _), trained in zip(drawn, compacts, strict=True):
        totals.add(held, trained, float(task.samples(client)))
    return aggregate(state, totals, settings)


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


def smallest(call: Callable[[], ServerState], repeats: int) -> tuple[float, Weights]:
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
        "data": given.data, "model": given.model, "method": given.method, "capacities": given.capacities,
        "local_epochs": given.epochs, "batch_size": given.batch, "local_optimiser": "sgd",
        "local_step": 0.1,
    })  # fmt: skip
    task = ImageTask(load_images(given.data), settings)
    federation = Federation.of(settings, task)
    full, private = federation.initial()
    state = ServerState(full)
    ways: dict[str, Callable[[], ServerState]] = {
        "fairfold": lambda: batched.run_round(state, private, federation, Rejections()),
        "loop": lambda: loop.run_round(state, private, federation, Rejections()),
    }
    if given.method in ("fair", "fair_hom", "fedavg", "full_trn"):
        ways["stacked"] = lambda: stacked_round(state, federation)
    cohort = sample_cohort(settings, task.num_clients, 0).tolist()
    images = sum(task.samples(client) for client in cohort) * given.epochs
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
