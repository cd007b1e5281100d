"""What a round costs the server when many nodes are registered and few are drawn, over messages in one process.

    python benchmarks/fleet_size.py --drawn 100 --registered 100 1000 10000 100000

Nodes answer at once with nothing to train, so that what is left is the server's own work: drawing, asking, orders,
checks, the step, the checkpoint and the record. Shown is the median over rounds after the first, in which those drawn
are asked what they can hold, too (who is drawn for the first time is asked in later rounds as well: of few registered
that is nobody soon, of many nearly everybody), in processor time, which others on the machine change little. Looking
who is connected is measured apart: it goes by all of them, and a run does it in no more than a tenth of its time; here,
where devices work in the same process, that is in every round.
"""

import argparse
import gc
import itertools
import statistics
import tempfile
import time
from pathlib import Path

import torch
from flwr.app import Context
from flwr.serverapp import Grid

from fairfold import Settings
from fairfold import atomic_io as files
from fairfold.data import Interactions
from fairfold.flower import FairStrategy, InProcessGrid, LocalData, make_client_app

ITEMS = 1_000


def local(context: Context, num_items: int) -> LocalData:
    item = torch.tensor([context.node_id % num_items])
    return LocalData(Interactions.from_pairs(torch.zeros(1, dtype=torch.int64), item, 1, num_items))


def measured(registered: int, drawn: int, rounds: int) -> dict[str, float]:
    settings = Settings(
        algorithm={"kind": "closed_form", "aggregation": "delta", "server_optimizer": "sgd"},
        fleet={"capacities": "1x-4x", "clients_per_round": drawn, "network": {"push": False}},
        run={"rounds": rounds, "evaluate_every": rounds + 1},
    )
    with tempfile.TemporaryDirectory() as place:
        app = make_client_app(local, capacity="1x", state=Path(place) / "devices")
        grid = InProcessGrid(app, ({"partition-id": number} for number in range(registered)))
        gc.collect()
        gc.freeze()  # a node is an object of this process here: garbage collection would look at each again and again
        strategy = FairStrategy(settings, ITEMS, folder=Path(place) / "run", evaluate=False, round_timeout=0.0)
        devices, deliver = 0.0, grid._deliver

        def timed(message: object) -> str:
            nonlocal devices
            began = time.process_time()
            found = deliver(message)  # type: ignore[arg-type]
            devices += time.process_time() - began
            return found

        looking, look = 0.0, strategy.nodes._look_up

        def looked(grid: Grid) -> None:
            nonlocal looking
            began = time.process_time()
            look(grid)
            looking += time.process_time() - began

        strategy.nodes._look_up = looked  # type: ignore[method-assign]
        grid._deliver = timed  # type: ignore[method-assign]
        ends, spent, looks = [time.process_time()], [0.0], [0.0]
        done = strategy.aggregate_evaluate

        def noted(number: int, replies: object) -> object:
            ends.append(time.process_time())
            spent.append(devices)
            looks.append(looking)
            return done(number, replies)  # type: ignore[arg-type]

        strategy.aggregate_evaluate = noted  # type: ignore[method-assign,assignment]
        strategy.start(grid)
        server = [b - a - (y - x) for a, b, x, y in zip(ends[1:], ends[2:], spent[1:], spent[2:], strict=False)]
        who = [b - a for a, b in itertools.pairwise(looks[1:])]
        lines = (Path(place) / "run" / "nodes.jsonl").stat().st_size
        others = statistics.median(all_of - look for all_of, look in zip(server, who, strict=True))
        return {
            "ms": 1000 * statistics.median(server), "others": 1000 * others, "look": 1000 * statistics.median(who),
            "kB": lines / 1000 / rounds,
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--registered", type=int, nargs="+", default=[100, 1_000, 10_000])
    parser.add_argument("--drawn", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=12)
    given = parser.parse_args()
    files.Disk.fsync = lambda _disk, _descriptor: None  # type: ignore[method-assign,assignment]
    for registered in given.registered:
        found = measured(registered, given.drawn, given.rounds)
        print(f"{registered:>8,} registered, {given.drawn} drawn: {found['ms']:7.1f} ms of the server per round, of "
              f"which {found['look']:.1f} ms looking who is there and {found['others']:.1f} ms the rest, "
              f"{found['kB']:.1f} kB of nodes.jsonl per round")  # fmt: skip


if __name__ == "__main__":
    main()
