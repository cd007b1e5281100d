"""A round that is under way over a network."""

import time
from dataclasses import dataclass, field

from fairfold.flower.nodes import Node
from fairfold.flower.wire import Order


@dataclass
class OpenRound:
    """A round that is under way.

    Attributes:
        orders: What the devices of each size were asked, as they see it; by node where every one has its own hash.
        waiting: Who has not answered.
    """

    orders: dict[int, Order] = field(default_factory=dict)
    waiting: dict[int, Node] = field(default_factory=dict)
    answered: int = 0
    bytes_down: int = 0
    bytes_up: int = 0
    started: float = field(default_factory=time.monotonic)
