"""The same rounds by different runners: the readable one, which is the oracle, and the fast ones.

A runner takes settings and data and gives back all that is left after some rounds. Whatever runs a federation, be it a
backend of the simulation or a network, can be one.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from unittest import mock

import torch

from fairfold.backends import native, stepped
from fairfold.backends.batched import batched, takes_steps
from fairfold.backends.cuda_graph import GraphBackend
from fairfold.backends.gather import Active
from fairfold.backends.image_graph import ImageGraphBackend
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.kernels.native import loader
from fairfold.protocol.faults import Rejections
from fairfold.protocol.people import ImagePeople
from fairfold.protocol.round import Backend, in_turn, run_round
from fairfold.protocol.words import State, on
from fairfold.protocol.work import Work
from fairfold.settings import Settings
from fairfold.simulate.world import World
from fairfold.values import Weights

Data = Dataset | ImageDataset

DOUBLE, SINGLE = "double", "single"
"""What devices really compute in is single; in double a mistake shows to the last digits, but lost digits do not."""

CPU = torch.device("cpu")


@contextmanager
def precision(name: str = DOUBLE) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype({DOUBLE: torch.float64, SINGLE: torch.float32}[name])
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@dataclass(frozen=True)
class Outcome:
    """All that is left after some rounds."""

    state: State
    private: Weights
    rejections: Counter[str]


@dataclass(frozen=True)
class Runner:
    """Something that runs a federation.

    Attributes:
        run: From settings and data, some rounds.
        serves: Whether it is made for what a world does.
    """

    run: Callable[[Settings, Data, int], Outcome]
    serves: Callable[[World], bool]


def by_backend(
    make: Callable[[World], Backend], device: torch.device = CPU
) -> Callable[[Settings, Data, int], Outcome]:
    """A runner's rounds: those of the simulation, with some backend."""

    def run(settings: Settings, data: Data, rounds: int) -> Outcome:
        world = World.of(settings, data)
        state, rejections = world.initial().to(device), Rejections()
        world.people.private = on(world.people.private, device)
        backend = make(world)
        for _ in range(rounds):
            state = run_round(state, world.fleet, world.people, rejections, backend)
        return Outcome(state.to(CPU), on(world.people.private, CPU), rejections.counts)

    return run


def _program(world: World) -> Backend:
    """The compiled step left out."""

    def run(*arguments: object) -> Iterator[object]:
        with mock.patch.object(native, "train", return_value=False):
            yield from batched(*arguments)  # type: ignore[arg-type]

    return run  # type: ignore[return-value]


def graph(device: torch.device) -> Callable[[World], Backend]:
    """A cohort as one program; of images where the world is one of them."""

    def make(world: World) -> Backend:
        if isinstance(world.people, ImagePeople):
            return ImageGraphBackend(world.fleet, world.people, device)
        return GraphBackend(world.fleet, world.people, device, torch.get_default_dtype())

    return make


def takes_plain_steps(world: World) -> bool:
    """Whether a cohort can be one program: gradient steps, and no proximal term."""
    return takes_steps(world.plan) and not getattr(world.plan.algorithm, "prox", 0.0)


def _has_compiled_steps(world: World) -> bool:
    return takes_steps(world.plan) and not world.plan.algorithm.images


IN_TURN = Runner(by_backend(lambda _: in_turn), lambda _: True)
RUNNERS: dict[str, Runner] = {
    "batched": Runner(by_backend(lambda _: batched), lambda _: True),
    "without the kernel": Runner(by_backend(_program), _has_compiled_steps),
    "graph": Runner(by_backend(graph(CPU)), takes_plain_steps),
}
"""All that must give what clients in turn give, where they serve."""

if loader.library() is None:  # the same program twice
    del RUNNERS["without the kernel"]


def compare(expected: Outcome, found: Outcome, digits: str = DOUBLE, absolute: float = 1e-8) -> None:
    """Model, sums, users' vectors and refusals are the same."""
    assert found.rejections == expected.rejections
    assert found.state.round_number == expected.state.round_number
    assert found.state.moments.keys() == expected.state.moments.keys()
    pairs = [(expected.state.full, found.state.full), (expected.private, found.private)]
    pairs += [(of, found.state.moments[key]) for key, of in expected.state.moments.items()]
    for wanted, mine in pairs:
        assert wanted.keys() == mine.keys()
        for name, tensor in wanted.items():
            relative, least = 1e-6, absolute
            if digits == SINGLE:  # numbers that are small by cancelling have the digits of what they came from
                relative, least = 0.0, 1e-5 * float(tensor.abs().max())
            torch.testing.assert_close(mine[name], tensor, rtol=relative, atol=least)


def check_rounds(
    data: Callable[[], Data],
    settings: Settings,
    digits: str = DOUBLE,
    rounds: int = 3,
    runner: Runner = RUNNERS["batched"],
    absolute: float = 1e-8,
) -> None:
    """A runner leaves what clients in turn leave."""
    with precision(digits):
        expected = IN_TURN.run(settings, data(), rounds)
        compare(expected, runner.run(settings, data(), rounds), digits, absolute)


_under_autograd = stepped.train


def compiled_serves_all(clients: list[Active], work: Work) -> None:
    """In the place of :func:`stepped.train`: nobody is left to it but devices of FedHM."""
    assert all(client.factors for client in clients)
    _under_autograd(clients, work)
