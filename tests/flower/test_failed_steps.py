"""Nothing that a device sends ends a run: plain runs name the culprit, secure ones drop the round."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from flwr.app import Array, ArrayRecord, Message

from fairfold.config import Settings
from fairfold.config.files import load_settings
from fairfold.errors import InvalidState
from fairfold.federation.robust import Bounds
from fairfold.federation.round import CULPRIT, MAX_CULPRITS, STEP_FAILED
from fairfold.federation.updates import Aggregate, nonzero_values
from fairfold.flower.protocol import ARRAYS, STATISTICS
from fairfold.flower.vectors import INDICES
from fairfold.privacy.secure.client import SecureClient
from fairfold.privacy.secure.masking import FixedPointVector
from fairfold.runs.events import read_events
from tests.flower.test_secure import data as secure_data
from tests.flower.test_secure import secure_settings
from tests.flower.test_strategy import facts
from tests.support.federations import tiny_data
from tests.support.nodes import Nodes, in_process
from tests.support.settings import make_settings

NODES, USERS, ITEMS = 10, 20, 30
Change = Callable[[Message], None]


def plain_settings(**keys: Any) -> Settings:
    base: dict[str, Any] = {"rounds": 3, "capacities": "1x-2x", "clients_per_round": None, "evaluate_every": 3}
    return make_settings(**base | {"algorithm": {"kind": "co_occurrence", "support": 1, "tune": False}} | keys)


def fleet(settings: Settings, where: Path, hostile: dict[str, Change], ratings: bool = False, **options: Any) -> Nodes:
    """A fleet whose last node changes its replies to some types of message."""
    nodes = in_process(tiny_data(3, USERS, ITEMS, ratings), settings, NODES, where / "devices", **options)
    true = nodes.grid.app

    def app(message: Message, context: Any) -> Message:
        reply = true(message, context)
        if context.node_id == NODES and message.metadata.message_type in hostile:
            hostile[message.metadata.message_type](reply)
        return reply

    nodes.grid.app = app  # type: ignore[assignment]
    return nodes


def arrays_of(reply: Message) -> ArrayRecord:
    found = reply.content[ARRAYS]
    assert isinstance(found, ArrayRecord)
    return found


class NotPositiveDefinite:
    """Sums within all bounds, of the norm that so many users may have, that are subtracted and not added."""

    def __init__(self, first_round: int, weight: float = 1e4) -> None:
        self.first_round, self.weight, self.sent = first_round, weight, dict[str, numpy.ndarray]()

    def __call__(self, reply: Message) -> None:
        arrays = arrays_of(reply)
        self.sent = self.sent or {name: array.numpy().copy() for name, array in arrays.items()}
        if int(reply.metadata.group_id) < self.first_round:
            return
        facts(reply)["weight"] = self.weight
        for name, values in self.sent.items():
            if not name.endswith(INDICES):
                total = float(numpy.abs(values).sum())
                arrays[name] = Array((-numpy.abs(values) / total * self.weight / 2).astype(values.dtype))
            else:
                arrays[name] = Array(values)


@pytest.mark.parametrize("first_round", [1, 2])
def test_a_plain_run_names_and_leaves_out_the_culprit(
    first_round: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The model is that of the same fleet without the device, where it was hostile from the start."""
    nodes = fleet(plain_settings(), tmp_path, {"train": NotPositiveDefinite(first_round)}, folder=tmp_path / "run")
    with caplog.at_level(logging.WARNING, "fairfold"):
        state = nodes.run()
    strategy = nodes.strategy
    assert state.round_number == 3
    assert strategy.nodes.left_out == {NODES: CULPRIT}
    assert strategy.progress.rejections.counts == {STEP_FAILED: 1, CULPRIT: 1}
    assert f"node {NODES} left out: {CULPRIT}" in caplog.text
    assert "no model follows from the sums" in caplog.text
    assert "under masks" not in caplog.text
    rounds = [event for event in read_events(tmp_path / "run") if event["event"] == "round"]
    counted = [(event["round"], event["counted"]) for event in rounds]
    assert counted == [*((number, True) for number in range(1, first_round)), (first_round, False),
                       *((number, True) for number in range(first_round, 4))]  # fmt: skip
    assert [NODES in event["used"] for event in rounds] == [False] * 4 if first_round == 1 else [True] + [False] * 3
    if first_round == 1:
        others = fleet(plain_settings(), tmp_path / "others", {})
        others.grid.fault = lambda _round, node: "drop" if node == NODES - 1 else None
        for name, tensor in others.run().full.items():
            torch.testing.assert_close(state.full[name], tensor)


def test_more_culprits_than_one_round_finds_are_left_out_over_several(tmp_path: Path) -> None:
    """Nine of twenty devices: eight are found in one attempt, which is dropped, and the last one in the next."""
    hostile = range(12, 21)
    nodes = in_process(tiny_data(3, 40, ITEMS), plain_settings(), 20, tmp_path / "devices")
    true, lies = nodes.grid.app, {node: NotPositiveDefinite(1) for node in hostile}

    def app(message: Message, context: Any) -> Message:
        reply = true(message, context)
        if context.node_id in lies and message.metadata.message_type == "train":
            lies[context.node_id](reply)
        return reply

    nodes.grid.app = app  # type: ignore[assignment]
    state = nodes.run()
    assert state.round_number == 3
    assert nodes.strategy.nodes.left_out == dict.fromkeys(hostile, CULPRIT)
    assert len(lies) > MAX_CULPRITS
    assert nodes.strategy.progress.rejections.counts == {STEP_FAILED: 2, CULPRIT: len(lies)}


def test_a_step_that_works_with_no_update_names_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = plain_settings().with_changes({"fleet.network.max_failed_rounds": 3})

    def fails(*_: Any) -> Any:
        raise ZeroDivisionError("whatever was sent")

    monkeypatch.setattr(type(settings.algorithm), "server_update", fails)
    nodes = fleet(settings, tmp_path, {})
    with pytest.raises(InvalidState, match="whatever was sent"):
        nodes.run()
    assert nodes.strategy.nodes.left_out == {}


RECIPE_CHANGES = {"fleet.capacities": "1x-2x", "fleet.clients_per_round": None, "run.rounds": 3,
                  "run.evaluate_every": 3, "run.baselines": False}  # fmt: skip


@pytest.mark.parametrize("recipe", [None, "fair", "paper"])
def test_every_recipe_finds_the_culprit(recipe: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step that fails at one device's numbers: the model is that of the others after an attempt that failed."""
    settings = load_settings(None, RECIPE_CHANGES, recipe)
    algorithm, fails = type(settings.algorithm), [False, True]
    true = algorithm.server_update

    def server_update(self: Any, plan: Any, state: Any, aggregate: Aggregate) -> Any:
        sums = [nonzero_values(vector) for _, update in aggregate.parts() for vector in update.sums.values()]
        if any(float(vector.norm()) > 2e3 for vector in sums) or fails.pop():
            raise ZeroDivisionError("too large for this test")
        fails.append(False)
        return true(self, plan, state, aggregate)

    def large(reply: Message) -> None:
        facts(reply)["weight"] = 1e4
        arrays = arrays_of(reply)
        for name in [name for name in arrays if not name.endswith(INDICES)]:
            values = arrays[name].numpy()
            arrays[name] = Array(numpy.full_like(values, 4e3 / values.size**0.5))

    monkeypatch.setattr(algorithm, "server_update", server_update)
    monkeypatch.setattr(Bounds, "held", lambda _self, one: one.update)  # it would hold such a weight
    others = fleet(settings, tmp_path / "others", {})
    others.grid.fault = lambda _round, node: "drop" if node == NODES - 1 else None
    expected = others.run().full
    nodes = fleet(settings, tmp_path, {"train": large})
    state = nodes.run()
    assert nodes.strategy.nodes.left_out == {NODES: CULPRIT}
    assert nodes.strategy.progress.rejections.counts == {STEP_FAILED: 1, CULPRIT: 1}
    for name, tensor in expected.items():
        torch.testing.assert_close(state.full[name], tensor, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("weight", [0.0, 1e-300, 1e4])
@pytest.mark.parametrize("algorithm", ["co_occurrence", "closed_form", "gradient", "ratings"])
def test_weights_at_every_bound_end_no_run(algorithm: str, weight: float, tmp_path: Path) -> None:
    """Every tensor at its largest, with the weight at a bound: whatever is accepted, all rounds are run."""
    size = {"kind": algorithm} | ({"support": 1} if algorithm == "co_occurrence" else {})
    settings = plain_settings(algorithm=size, rounds=2)

    def largest(reply: Message) -> None:
        facts(reply)["weight"] = weight
        arrays = arrays_of(reply)
        for name in [name for name in arrays if not name.endswith(INDICES)]:
            values = arrays[name].numpy()
            arrays[name] = Array(numpy.full_like(values, -99.0 * max(weight, 1e-30)))

    nodes = fleet(settings, tmp_path, {"train": largest}, ratings=algorithm == "ratings")
    state = nodes.run()
    assert state.round_number == 2
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.full.values())


@pytest.mark.parametrize("value", [1e308, 2.0**31, -1.0])
@pytest.mark.parametrize("name", ["users", "counts"])
def test_huge_statistics_are_left_out(name: str, value: float, tmp_path: Path) -> None:
    def huge(reply: Message) -> None:
        arrays = arrays_of(reply)
        assert name in arrays
        arrays[name] = Array(numpy.full_like(arrays[name].numpy(), value))

    nodes = fleet(plain_settings(), tmp_path, {STATISTICS: huge})
    assert nodes.run().round_number == 3
    honest = fleet(plain_settings(), tmp_path / "honest", {})
    honest.run()
    found, expected = (of.strategy.network_state.statistics[name] for of in (nodes, honest))
    assert bool((found <= expected).all())
    assert float(found.sum()) < float(expected.sum())


def lie_under_masks(monkeypatch: pytest.MonkeyPatch, first_round: int, most: float = float("inf")) -> list[int]:
    """One device of a fleet masks numbers of its choice, from a round on; returns the rounds in which it did."""
    true, liar, lies = SecureClient.mask, list[int](), list[int]()

    def mask(device: SecureClient, vector: FixedPointVector) -> bytes:
        liar[:] = liar or [device.identity.name]
        number = device.session.round + 1
        if device.session.purpose == "train" and number >= first_round and device.identity.name == liar[0]:
            lies.append(number)
            if len(lies) <= most:
                vector = numpy.random.default_rng(number).integers(0, 2**32, len(vector), dtype=numpy.uint32)
        return true(device, vector)

    monkeypatch.setattr(SecureClient, "mask", mask)
    return lies


def secure_fleet(where: Path, rounds: int = 2, tries: int | None = None, scheme: str = "", **options: Any) -> Nodes:
    changes = {"fleet.network.max_failed_rounds": tries, "algorithm.tune": False}
    settings = secure_settings("co_occurrence", rounds=rounds).with_changes(changes)
    settings = settings.with_changes({"fleet.capacities": scheme}) if scheme else settings
    return in_process(secure_data(), settings, secure_data().train.num_users, where, **options)


def test_a_secure_run_drops_the_round_and_ends_with_the_last_good_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    lies = lie_under_masks(monkeypatch, first_round=2)
    whole = "1x"  # all pairs in one part: a model after the first round
    nodes = secure_fleet(tmp_path / "a", folder=tmp_path / "run", rounds=4, tries=3, scheme=whole)
    with caplog.at_level(logging.WARNING, "fairfold"):
        state = nodes.run()
    assert state.round_number == 1
    assert lies == [2, 2, 2]
    assert nodes.strategy.progress.rejections.counts[STEP_FAILED] == 3
    assert not nodes.strategy.nodes.left_out, "nobody is named"
    assert "under masks nobody can be named" in caplog.text
    assert "round 2 was dropped 3 times" in nodes.strategy.ended
    assert (tmp_path / "run" / "result.json").exists()
    monkeypatch.undo()
    honest = secure_fleet(tmp_path / "b", rounds=1, scheme=whole)
    for name, tensor in honest.run().full.items():
        assert torch.equal(state.full[name], tensor)


def test_a_secure_round_is_drawn_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that lies once costs an attempt: the model is that of an honest fleet."""
    lies = lie_under_masks(monkeypatch, first_round=2, most=1)
    nodes = secure_fleet(tmp_path / "a", rounds=3, tries=3)
    state = nodes.run()
    assert lies == [2, 2, 3]
    assert state.round_number == 3
    monkeypatch.undo()
    for name, tensor in secure_fleet(tmp_path / "b", rounds=3).run().full.items():
        assert torch.equal(state.full[name], tensor)


def test_a_first_round_that_is_always_dropped_ends_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lie_under_masks(monkeypatch, first_round=1)
    with pytest.raises(InvalidState, match=r"round 1, tried 2 times.*no model follows from the sums"):
        secure_fleet(tmp_path, tries=2).run()


@pytest.mark.parametrize("recipe", ["fair", "paper"])
def test_random_words_under_masks_end_no_run(recipe: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A FAIR fleet runs all rounds, or ends with a good model: its tensors are finite."""
    lies = lie_under_masks(monkeypatch, first_round=2)
    secure = {"privacy.level": "secure", "privacy.min_cohort": 2, "fleet.network.max_failed_rounds": 2}
    settings = load_settings(None, RECIPE_CHANGES | secure, recipe)
    nodes = in_process(tiny_data(3, USERS, ITEMS), settings, NODES, tmp_path)
    state = nodes.run()
    assert lies
    assert state.round_number == 3 or nodes.strategy.ended
    assert all(bool(torch.isfinite(tensor).all()) for tensor in state.full.values())
