"""What every device runs: its own file (or, in a simulation, a share of a synthetic world) and what it can hold."""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

from flwr.app import Context

from fairfold.flower import LocalData, LocalFile, make_client_app, share_of

if TYPE_CHECKING:
    from fairfold.data import Dataset

SIZES = ("1x", "4x", "16x", "64x")


@lru_cache
def world(num_items: int) -> Dataset:
    from fairfold.data.synthetic import SyntheticWorld

    return SyntheticWorld(users=400, items=num_items).dataset()


def data(context: Context, num_items: int) -> LocalData:
    if "data" in context.node_config:  # a real device: --node-config 'data="mine.csv" capacity="40MB"'
        return LocalFile(str(context.node_config["data"]), holdout=0.2).load(num_items)
    return share_of(world(num_items), context)


def budget(context: Context) -> str:
    given = context.node_config.get("capacity")
    return str(given or SIZES[int(context.node_config["partition-id"]) % len(SIZES)])


app = make_client_app(data, budget=budget)
