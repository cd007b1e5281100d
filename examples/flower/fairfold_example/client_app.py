"""The app of every device: its own file (or, in a simulation, a share of synthetic data) and its capacity."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from flwr.app import Context

from fairfold.flower import LocalData, LocalFile, make_client_app, node_partition

if TYPE_CHECKING:
    from fairfold.data import Dataset

SIZES = ("1x", "4x", "16x", "64x")


@lru_cache
def synthetic_data(num_items: int) -> Dataset:
    from fairfold.data.synthetic import SyntheticDataset

    return SyntheticDataset(users=400, items=num_items).dataset()


def data(context: Context, num_items: int) -> LocalData:
    if "data" in context.node_config:  # a real device: --node-config 'data="mine.csv" capacity="40MB"'
        return LocalFile(str(context.node_config["data"]), holdout=0.2).load(num_items)
    return node_partition(synthetic_data(num_items), context)


def capacity(context: Context) -> str:
    given = context.node_config.get("capacity")
    return str(given or SIZES[int(context.node_config["partition-id"]) % len(SIZES)])


app = make_client_app(data, capacity=capacity)
