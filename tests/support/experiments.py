"""A small experiment for tests: a synthetic world, a few rounds."""

from pathlib import Path

SMALL = """
title = "Small"
about = "For tests."
seeds = [0, 1]
notes = ["A choice."]

[set]
data = { users = 12, items = 60, interactions_per_user = 10 }
model = { kind = "mf", factors = 4 }
subspace = { method = "fair", mapping = "element" }
fleet.clients_per_round = 6
run = { rounds = 4, evaluate_every = 2 }

[set.algorithm]
kind = "gradient"
local_optimizer = "adam"
local_lr = 0.01
aggregation = "paper"
batch_size = 4

[quick]
run.rounds = 2

[tables.one]
title = "One table"
source = "tab:one"
metric = "NDCG@20"
baselines = true

[tables.one.rows]
"1x" = { fleet.capacities = "1x", columns = ["FedAvg"] }
"1x-16x" = { fleet.capacities = "1x-16x" }

[tables.one.columns]
FedAvg = { subspace.method = "fedavg", rows = ["1x"] }
FAIR = { subspace.method = "fair" }
HeteroFL = { subspace.method = "heterofl" }

[tables.one.paper]
"1x-16x" = { FAIR = 0.25, HeteroFL = "N/A" }

[search]
values = { "algorithm.local_lr" = [0.1, 0.001] }
set = { run.rounds = 2 }
cells = [["one", "1x-16x", "FAIR"]]
"""


def write(folder: Path, text: str = SMALL, name: str = "small") -> str:
    path = folder / f"{name}.toml"
    path.write_text(text)
    return str(path)
