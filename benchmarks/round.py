"""One round of the authors' example: fairfold's batched backend against a plain dense loop, both in one run.

    FAIRFOLD_DATA=... python benchmarks/round.py [--data goodreads-100] [--rounds 5] [--device cuda] [--sweep CSV]
    python benchmarks/round.py --plot CSV

The example: NeuMF with 8 factors and BPR, capacities 1x-2x, K = 10, E = 5, batches of 512, Adam 1e-3. The plain loop is
what one would write first: every client gets the compact vectors, a stored index and sign for every virtual weight
where they are compressed, torch's fused Adam over all of them, and is recovered and averaged on its own. Seconds are
given twice: as they passed, and as the processor worked. The second do not depend on what else the machine does;
compare them with OMP_NUM_THREADS=1, under which no thread waits busily.

``--sweep`` measures how a round's seconds grow with the catalogue n, the cohort K and the compression c, on synthetic
worlds, and ``--plot`` draws such a file (a PNG beside it).
"""

import argparse
import csv
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fairfold.backends.batched import batched
from fairfold.backends.cuda_graph import GraphBackend
from fairfold.config import Settings, nested, read_settings
from fairfold.data import Dataset, load
from fairfold.data.synthetic import SyntheticDataset
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import Backend, run_round
from fairfold.federation.updates import State, to_device
from fairfold.models import NeuMF, sampled_bpr
from fairfold.subspace.projection import Hashed, Projection
from fairfold.typing import Weights

WARM_UP, IN_A_ROW = 10, 100
"""Rounds that a GPU is given to reach its clock, and rounds that are measured after them."""


def authors_example(changes: dict[str, object]) -> Settings:
    base: dict[str, object] = {
        "model.kind": "neumf", "algorithm.kind": "gradient", "algorithm.local_optimizer": "adam",
        "algorithm.local_lr": 1e-3, "algorithm.local_epochs": 5, "algorithm.batch_size": 512,
        "algorithm.aggregation": "paper", "algorithm.weighting": "data", "subspace.mapping": "element",
        "fleet.clients_per_round": 10, "fleet.capacities": "1x-2x",
    }  # fmt: skip
    return read_settings(nested(base | changes))


def dense_round(state: State, world: Federation) -> Weights:
    """The plain loop."""
    plan, clients = world.plan, world.clients
    assignments, private, work = plan.assignments(0), clients.local_state, clients.training
    module = NeuMF(1, 1, plan.settings.model.factors)
    total, weights = {name: torch.zeros_like(tensor) for name, tensor in state.full.items()}, 0.0
    for client in world.sampler.cohort(0).tolist():
        held = assignments[int(world.sampler.size[client])].projections or {}
        compacts, stored = {}, {}
        for name, projection in held.items():
            assert isinstance(projection, Hashed)
            compacts[name] = nn.Parameter(projection.reduce(state.full[name]))
            if not projection.subspace.is_full:
                device = state.full[name].device
                slots, signs = projection.subspace.slots(0, projection.subspace.full_size, device)
                stored[name] = (slots.view(projection.shape), signs.float().view(projection.shape))
        own = {name: nn.Parameter(rows[client : client + 1].clone()) for name, rows in private.items()}
        optimizer = torch.optim.Adam([*compacts.values(), *own.values()], lr=work.steps.local_lr, fused=True)
        for batch in work.batches(client, clients.source(0, client)):
            items = batch.items.to(state.full[next(iter(held))].device)
            loss = _loss(module, compacts, stored, own, held, items)
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        weight = float(clients.num_samples(client))
        for name, projection in held.items():
            total[name].add_(projection.recover(compacts[name].detach()), alpha=weight)
        weights += weight
    return {name: tensor / weights for name, tensor in total.items()}


def _loss(
    module: NeuMF,
    compacts: dict[str, nn.Parameter],
    stored: dict[str, tuple[Tensor, Tensor]],
    own: dict[str, nn.Parameter],
    held: dict[str, Projection],
    items: Tensor,
) -> Tensor:
    def table(name: str, ids: Tensor) -> Tensor:
        if name in stored:
            slots, signs = stored[name]
            return compacts[name][slots[ids]] * signs[ids]
        return nn.functional.embedding(ids, compacts[name].view(held[name].shape))

    user = [own["user_product.weight"], own["user_network.weight"]]
    rows = [[table(f"item_{branch}.weight", ids) for branch in ("product", "network")] for ids in items.T]
    dense = {name: compacts[name].view(held[name].shape) for name in compacts if not name.startswith("item")}

    class Combine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = module

        def forward(self, *vectors: Tensor) -> Tensor:
            return self.model.combine((vectors[0], vectors[1]), (vectors[2], vectors[3]))

    combine = Combine()
    weights = {f"model.{name}": weight for name, weight in dense.items()}
    scores = [functional_call(combine, weights, (*(u.expand(len(items), -1) for u in user), *row)) for row in rows]
    vectors = [u.expand(len(items), -1) for u in user] + [vector for row in rows for vector in row]
    norms = sum(vector.square().sum() for vector in vectors) / len(items)
    return sampled_bpr(torch.stack(scores[:2], dim=1)).mean() + 0.5e-6 * norms


def seconds(call: Callable[[], object]) -> tuple[float, float]:
    """How long a call took, and how long the processor worked for it."""
    passed, worked = time.perf_counter(), time.process_time()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - passed, time.process_time() - worked


def prepared(data: Dataset, settings: Settings, device: str = "cpu") -> tuple[Federation, State]:
    world = Federation.of(settings, data)
    state = world.initial().to(torch.device(device))
    world.clients.local_state = to_device(world.clients.local_state, torch.device(device))
    return world, state


def after_a_round(world: Federation, state: State, backend: Backend) -> State:
    return run_round(state, world.sampler, world.clients, Rejections(), backend)


def compare(data: Dataset, rounds: int, device: str = "cpu") -> None:
    world, state = prepared(data, authors_example({"run.rounds": WARM_UP + IN_A_ROW}), device)
    backend: Backend = batched
    if device == "cuda":
        backend = GraphBackend(world.sampler, world.clients, torch.device(device))
    ours, plain = [], []
    after: list[Weights] = [{}, {}]
    private = world.clients.local_state

    def run_ours() -> None:
        world.clients.local_state = {name: tensor.clone() for name, tensor in private.items()}
        after[0] = after_a_round(world, state, backend).full
        world.clients.local_state = private

    def run_plain() -> None:
        after[1] = dense_round(state, world)

    run_ours()  # warm-up: pages and threads
    for number in range(rounds):
        ours.append(seconds(run_ours))
        plain.append(seconds(run_plain))
        (a, b), (c, d) = ours[-1], plain[-1]
        print(f"  round {number + 1}: fairfold {a:.3f} s ({b:.3f}), plain dense loop {c:.3f} s ({d:.3f})", flush=True)
    tables = [name for name in after[0] if name.startswith("item_product")]
    difference = max(float((after[0][name] - after[1][name]).abs().max()) for name in tables)
    for kind, name in enumerate(("seconds", "processor seconds")):
        mine, theirs = (statistics.median(pair[kind] for pair in found) for found in (ours, plain))
        print(f"median {name}: fairfold {mine:.3f}, plain {theirs:.3f}: {theirs / mine:.1f} x faster")
    print(f"largest difference of the item table after the round: {difference:.1e}")
    if device == "cuda":
        _one_after_another(world, state, backend)


def _one_after_another(world: Federation, state: State, backend: Backend) -> None:
    """A run as it is: each round from the last one's end, with another cohort."""
    times = []
    for _ in range(WARM_UP + IN_A_ROW):
        started = time.perf_counter()
        state = after_a_round(world, state, backend)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - started))
    kept = times[WARM_UP:]
    print(f"{len(kept)} rounds in a row, each with its own cohort: median {statistics.median(kept):.1f} ms, "
          f"mean {statistics.mean(kept):.1f} ms, fastest {min(kept):.1f} ms, slowest {max(kept):.1f} ms")  # fmt: skip


def sweep(path: Path, hardware: str) -> None:
    """Seconds a round over n, K and c."""
    base = {"items": 50_000, "clients": 10, "compression": 4}
    cases = [base | {"items": n} for n in (12_500, 25_000, 50_000, 100_000, 200_000)]
    cases += [base | {"clients": k} for k in (2, 5, 20, 40)] + [base | {"compression": c} for c in (1, 2, 16, 64)]
    rows: list[dict[str, float | str]] = []
    for case in cases:
        world = SyntheticDataset(users=50, items=case["items"], interactions_per_user=2_000)
        changes = {"fleet.capacities": f"{case['compression']}x", "fleet.clients_per_round": case["clients"]}
        made, state = prepared(world.dataset(), authors_example(changes))
        after_a_round(made, state, batched)
        found = [seconds(lambda: after_a_round(made, state, batched)) for _ in range(5)]  # noqa: B023
        worked = round(statistics.median(pair[1] for pair in found), 4)
        rows.append({**case, "processor_seconds": worked, "hardware": hardware})
        print("  ", rows[-1], flush=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, rows[0].keys(), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def plot(path: Path) -> Path:
    """Draw a sweep: seconds over each of the three, the others held."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with path.open() as file:
        rows = [{key: float(value) for key, value in row.items() if key != "hardware"} for row in csv.DictReader(file)]
    names = {
        "items": "items in the catalogue, n / 16",
        "clients": "clients a round, K",
        "compression": "compression, c",
    }
    usual = {key: statistics.mode(row[key] for row in rows) for key in names}
    figure, axes = pyplot.subplots(1, 3, figsize=(11, 3.2), sharey=True, layout="constrained")
    for axis, (key, label) in zip(axes, names.items(), strict=True):
        line = sorted((row for row in rows if all(row[other] == usual[other] for other in names if other != key)),
                      key=lambda row: row[key])  # fmt: skip
        axis.plot([row[key] for row in line], [row["processor_seconds"] * 1e3 for row in line], "o-", color="#3465a4")
        axis.set(xscale="log", yscale="log", xlabel=label)
        axis.set_xticks([row[key] for row in line], [f"{row[key]:,.0f}" for row in line], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0].set_yticks(ticks := [20, 50, 100, 200, 500], [str(tick) for tick in ticks])
    axes[0].set_ylabel("milliseconds a round, one core")
    others = ", ".join(f"{key} {value:,.0f}" for key, value in usual.items())
    figure.suptitle(f"A round of the batched backend (each panel varies one of: {others})", fontsize=10)
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=110)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="goodreads-100")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--sweep", type=Path, help="write the sweep to this CSV")
    parser.add_argument("--plot", type=Path, help="only draw this CSV")
    parser.add_argument("--hardware", default="unnamed", help="what the sweep's figures were measured on")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"], help="where both sides run")
    arguments = parser.parse_args()
    if arguments.plot:
        print(plot(arguments.plot))
        return
    compare(load(arguments.data), arguments.rounds, arguments.device)
    if arguments.sweep:
        sweep(arguments.sweep, arguments.hardware)


if __name__ == "__main__":
    main()
