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

from fairfold.algorithms.gradient import GradientAlgorithm
from fairfold.backends import active_set
from fairfold.backends.active_set import ActiveSet
from fairfold.backends.batched import batched, supports_batched_training
from fairfold.backends.cuda_graph import GraphBackend
from fairfold.backends.image_graph import ImageGraphBackend
from fairfold.config import Settings
from fairfold.data import Dataset
from fairfold.data.images import ImageDataset
from fairfold.federation.algorithm import TrainsImages
from fairfold.federation.clients import ImageClients
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import Backend, run_round, sequential
from fairfold.federation.training import RankingTraining
from fairfold.federation.updates import State, to_device
from fairfold.kernels.native import loader
from fairfold.typing import Weights

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
    local_state: Weights
    rejections: Counter[str]


@dataclass(frozen=True)
class Runner:
    """Something that runs a federation.

    Attributes:
        run: From settings and data, some rounds.
        serves: Whether it is made for what a world does.
    """

    run: Callable[[Settings, Data, int], Outcome]
    serves: Callable[[Federation], bool]


def by_backend(
    make: Callable[[Federation], Backend], device: torch.device = CPU
) -> Callable[[Settings, Data, int], Outcome]:
    """A runner's rounds: those of the simulation, with some backend."""

    def run(settings: Settings, data: Data, rounds: int) -> Outcome:
        world = Federation.of(settings, data)
        state, rejections = world.initial().to(device), Rejections()
        world.clients.local_state = to_device(world.clients.local_state, device)
        backend = make(world)
        for _ in range(rounds):
            state = run_round(state, world.sampler, world.clients, rejections, backend)
        return Outcome(state.to(CPU), to_device(world.clients.local_state, CPU), rejections.counts)

    return run


def _program(world: Federation) -> Backend:
    """The compiled step left out."""

    def run(*arguments: object) -> Iterator[object]:
        with mock.patch.object(active_set, "train_compiled", return_value=False):
            yield from batched(*arguments)  # type: ignore[arg-type]

    return run  # type: ignore[return-value]


def graph(device: torch.device) -> Callable[[Federation], Backend]:
    """A cohort as one program; of images where the world is one of them."""

    def make(world: Federation) -> Backend:
        if isinstance(world.clients, ImageClients):
            return ImageGraphBackend(world.sampler, world.clients, device)
        return GraphBackend(world.sampler, world.clients, device, torch.get_default_dtype())

    return make


def supports_graph(world: Federation) -> bool:
    """Whether a cohort can be one program: gradient steps, and no proximal term."""
    algorithm = world.plan.algorithm
    if not supports_batched_training(world.plan):
        return False
    return isinstance(algorithm, GradientAlgorithm) and not algorithm.prox


def _has_compiled_steps(world: Federation) -> bool:
    return supports_batched_training(world.plan) and not isinstance(world.plan.algorithm, TrainsImages)


SEQUENTIAL = Runner(by_backend(lambda _: sequential), lambda _: True)
RUNNERS: dict[str, Runner] = {
    "batched": Runner(by_backend(lambda _: batched), lambda _: True),
    "without the kernel": Runner(by_backend(_program), _has_compiled_steps),
    "graph": Runner(by_backend(graph(CPU)), supports_graph),
}
"""All that must give what clients in turn give, where they serve."""

if loader.library() is None:  # the same program twice
    del RUNNERS["without the kernel"]


def compare(expected: Outcome, found: Outcome, digits: str = DOUBLE, absolute: float = 1e-8) -> None:
    """Model, sums, users' vectors and refusals are the same."""
    assert found.rejections == expected.rejections
    assert found.state.round_number == expected.state.round_number
    assert found.state.algorithm_state.keys() == expected.state.algorithm_state.keys()
    pairs = [(expected.state.full, found.state.full), (expected.local_state, found.local_state)]
    pairs += [(of, found.state.algorithm_state[key]) for key, of in expected.state.algorithm_state.items()]
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
        expected = SEQUENTIAL.run(settings, data(), rounds)
        compare(expected, runner.run(settings, data(), rounds), digits, absolute)


_under_autograd = active_set.train_lockstep


def compiled_serves_all(client_ids: list[ActiveSet], work: RankingTraining) -> None:
    """In the place of :func:`active_set.train_lockstep`: nobody is left to it but devices of FedHM."""
    assert all(client.factors for client in client_ids)
    _under_autograd(client_ids, work)
