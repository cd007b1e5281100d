"""Secure aggregation over messages: the sums of the simulation, and no single update in any message."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

from fairfold.config import Settings
from fairfold.data import Dataset
from fairfold.errors import InvalidMessage, InvalidSettings, InvalidState
from fairfold.flower import secure_aggregation as secure_round
from fairfold.flower import secure_client as secure_device
from fairfold.flower import wire
from fairfold.flower.fleet.server import ServerFolder
from fairfold.flower.messages import masked_in, pack_masked, pack_secure, secure_in
from fairfold.flower.preparation import default_privacy
from fairfold.flower.protocol import FACTS, SECURE, VERSION
from fairfold.flower.secure_aggregation import SecureRound, SecureRounds
from fairfold.privacy.fixed_point import MeasuredUpdate
from fairfold.privacy.ledger import remember_privacy, served_privacy
from fairfold.privacy.secure.client import SecureClient
from fairfold.privacy.secure.folder import ROUND
from fairfold.privacy.secure.masking import FixedPointVector
from fairfold.privacy.secure.messages import Session
from fairfold.runs.events import read_events
from tests.support.federations import tiny_data
from tests.support.nodes import Nodes, as_devices, assert_same, in_process, simulated

USERS = 8
ALGORITHMS: dict[str, dict[str, Any]] = {
    "co_occurrence": {"algorithm": {"kind": "co_occurrence", "support": 1}},
    "parts": {"algorithm": {"kind": "co_occurrence", "support": 1, "tune": False}},
    "closed_form": {"algorithm": {"kind": "closed_form", "server_optimizer": "sgd"}},
    "newton": {"algorithm": {"kind": "closed_form", "server_optimizer": "newton", "server_lr": 1.0}},
    "gradient": {"algorithm": {"kind": "gradient", "aggregation": "delta", "server_optimizer": "sgd"}},
    "paper": {"algorithm": {"kind": "gradient", "aggregation": "paper", "weighting": "data"}},
    "ratings": {"algorithm": "ratings"},
}


def secure_settings(case: str, smallest: int = 3, capacities: str = "1x-2x", rounds: int = 2) -> Settings:
    model = {} if case in ("co_occurrence", "parts") else {"model": {"kind": "mf", "factors": 3}}
    return Settings(
        **ALGORITHMS[case],
        **model,
        fleet={"capacities": capacities, "clients_per_round": None},
        run={"rounds": rounds, "evaluate_every": rounds},
        privacy={"level": "secure", "min_cohort": smallest},
    )


def data(users: int = USERS, case: str = "") -> Dataset:
    """Users with something to be guessed."""
    train, test = (tiny_data(seed, users, 30, ratings=case == "ratings").train for seed in (3, 4))
    return Dataset("tiny", train, test)


def federation(case: str, devices: Path, **options: Any) -> Nodes:
    more = {key: options.pop(key) for key in ("smallest", "capacities", "rounds") if key in options}
    users, tries = options.pop("users", USERS), options.pop("tries", None)
    settings = secure_settings(case, **more).with_changes({"fleet.network.max_failed_rounds": tries})
    return in_process(data(users, case), settings, users, devices, **options)


@pytest.mark.parametrize("case", list(ALGORITHMS))
def test_the_sums_are_those_of_the_simulation(case: str, tmp_path: Path) -> None:
    messages: list[Message] = []
    nodes = federation(case, tmp_path, inspect=messages.append)
    state = nodes.run()
    expected, _, _ = simulated(data(case=case), secure_settings(case), as_devices)
    assert_same(state.full, expected.full)
    assert not nodes.strategy.progress.rejections.counts
    assert nodes.strategy.progress.history[-1].num_clients == USERS
    quality = nodes.strategy.progress.history[-1].quality
    assert quality is not None
    assert 0 < quality.server <= (4 if case == "ratings" else 1)  # squared errors
    assert not nodes.strategy.open_round.node_qualities  # nobody's own is known
    no_update_is_seen(messages)
    assert not list(tmp_path.glob(f"*/secure/{ROUND}"))  # what was secret in a round is gone


def no_update_is_seen(messages: Iterable[Message]) -> None:
    """Replies have a vector under masks, and nothing beside it that is a device's."""
    for message in messages:
        if message.metadata.reply_to_message_id == "" or message.metadata.message_type == "query.capacity":
            continue
        facts = message.content[FACTS]
        assert set(facts) <= {"version", SECURE}, message.metadata.message_type
        for name, record in message.content.items():
            assert name == FACTS or (name == SECURE and isinstance(record, ArrayRecord) and list(record) == [SECURE])


# -- nodes that leave --------------------------------------------------------------------------------------------------

PHASES = ("query.secure_keys", "query.secure_shares", "train", "query.secure_sign", "query.secure_reveal")


class Leaving:
    """Nodes that fail when they are asked something for the first time in training, each something else."""

    def __init__(self, app: ClientApp, leaving: dict[str, int]) -> None:
        self.app, self.leaving, self.notes = app, dict(leaving), dict[int, FixedPointVector]()
        self._begun = not leaving.keys() & {"query.statistics"}
        self.spared = 0  # questions of the statistics before

    def __call__(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        self._begun = self._begun or kind == "query.statistics"
        if kind == "query.statistics" and self.spared > 0:
            self.spared -= 1
        elif self._begun and self.leaving.get(kind) == context.node_id - 1:
            del self.leaving[kind]
            raise RuntimeError("no electricity")
        return self.app(message, context)


def leaving(case: str, devices: Path, who: dict[str, int], monkeypatch: pytest.MonkeyPatch, **options: Any) -> Any:
    """A federation whose nodes leave, and each client's vector before it was masked."""
    made: list[Leaving] = []

    def wrapped(app: ClientApp) -> ClientApp:
        made.append(Leaving(app, who))
        return made[0]  # type: ignore[return-value]

    mask = SecureClient.mask

    def noted(machine: SecureClient, words: FixedPointVector) -> bytes:
        made[0].notes[machine.identity.name] = words.copy()
        return mask(machine, words)

    monkeypatch.setattr(SecureClient, "mask", noted)
    return federation(case, devices, app=wrapped, **options), made[0]


@pytest.mark.parametrize("case", ["gradient", "closed_form"])
def test_a_node_leaves_in_every_phase_and_the_sums_are_those_of_the_survivors(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    who = {kind: 2 * number for number, kind in enumerate(PHASES)}
    nodes, app = leaving(case, tmp_path, who, monkeypatch, users=12, smallest=2, rounds=2)
    sums: list[SecureRound] = []
    finish = SecureRound.finish

    def noted(summed: SecureRound) -> dict[int, MeasuredUpdate]:
        received = finish(summed)
        if summed.server.session.purpose == "train" and not sums:
            sums.append(summed)
            plain = [numpy.zeros(length, dtype=numpy.uint32) for length in summed.server.session.layout.lengths]
            for name in summed.server.survivors:
                for segment, where in summed.server.session.layout.slices(summed.server.sizes[name]):
                    plain[segment] += app.notes[name][where]
            assert len(summed.server.survivors) == 9
            for total, of in zip(summed.server.sums, plain, strict=True):
                assert numpy.array_equal(total, of)
        return received

    monkeypatch.setattr(SecureRound, "finish", noted)
    nodes.run()
    strategy = nodes.strategy
    assert sums
    assert strategy.progress.rejections.counts == {"no keys or shares": 2, "the device failed": 1}
    assert [report.num_clients for report in strategy.progress.history] == [9, 12]  # in the next round all are back
    network_state = strategy.network_state.acknowledged
    assert len(network_state) == 12
    for number in range(12):  # what each device remembers is what the server's sums hold
        assert nodes.kept(number) is not None


@pytest.mark.parametrize(("case", "phase"), [("gradient", "query.secure_sign"), ("co_occurrence", "train")])
def test_a_sum_that_is_lost_does_not_count_and_is_tried_again(
    case: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, _ = leaving(case, tmp_path, {phase: 1}, monkeypatch, smallest=8, capacities="1x")
    state = nodes.run()
    strategy = nodes.strategy
    assert [(report.round_number, report.num_clients) for report in strategy.progress.history] == [(1, 8), (2, 8)]
    failed = {"the device failed": 1} if phase == "train" else {}
    lost = 8 - len(failed)
    assert strategy.progress.rejections.counts == {"a secure sum that is lost": lost} | failed
    assert f"round 1: no usable update (8 were asked: {lost} × a secure sum that is lost" in caplog.text
    if case == "co_occurrence":  # as if nothing had happened; with gradients users' own vectors have gone on
        expected, _, _ = simulated(data(), secure_settings(case, smallest=8, capacities="1x"), as_devices)
        assert_same(state.full, expected.full)


def test_lost_statistics_do_not_count_and_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes, _ = leaving("co_occurrence", tmp_path, {"query.statistics": 1}, monkeypatch, smallest=8, capacities="1x")
    state = nodes.run()
    assert [(report.round_number, report.num_clients) for report in nodes.strategy.progress.history] == [(1, 8), (2, 8)]
    assert "round 1: no usable update (the statistics before it are lost: 7 of 8 devices left;" in caplog.text
    expected, _, _ = simulated(data(), secure_settings("co_occurrence", smallest=8, capacities="1x"), as_devices)
    assert_same(state.full, expected.full)


def test_after_some_tries_of_statistics_the_run_ends_and_can_be_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"smallest": 8, "capacities": "1x", "tries": 1, "folder": tmp_path / "run"}
    nodes, _ = leaving("co_occurrence", tmp_path / "devices", {"query.statistics": 1}, monkeypatch, **options)
    with pytest.raises(
        InvalidState, match=r"round 1, tried 1 times .*the statistics before it are lost: 7 of 8 devices"
    ):
        nodes.run()
    (event,) = (event for event in read_events(tmp_path / "run") if event["event"] == "round")
    assert (event["round"], event["counted"], event["used"]) == (1, False, [])
    assert set(event["left_out"].values()) == {"the statistics before the first round are lost"}
    again = federation("co_occurrence", tmp_path / "devices", resume=True, **options)
    state = again.run()
    assert [(report.round_number, report.num_clients) for report in again.strategy.progress.history] == [(1, 8), (2, 8)]
    expected, _, _ = simulated(data(), secure_settings("co_occurrence", smallest=8, capacities="1x"), as_devices)
    assert_same(state.full, expected.full)


def test_statistics_are_not_summed_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two sums of nearly the same devices the difference would be seen."""
    monkeypatch.setattr(wire, "WINDOW", 10)
    monkeypatch.setattr(secure_device, "WINDOW", 10)
    asked: list[int] = []
    begin = SecureRounds.begin

    def noted(summed: SecureRounds, run: int, number: int, purpose: str) -> dict[int, bytes]:
        asked.extend([number] if purpose == "statistics" else [])
        return begin(summed, run, number, purpose)

    monkeypatch.setattr(SecureRounds, "begin", noted)
    nodes, app = leaving("co_occurrence", tmp_path, {"query.statistics": 1}, monkeypatch, smallest=8, capacities="1x")
    app.spared = 8  # all of the first window
    state = nodes.run()
    assert asked == [0, 10, 10, 20]
    expected, _, _ = simulated(data(), secure_settings("co_occurrence", smallest=8, capacities="1x"), as_devices)
    assert_same(state.full, expected.full)


# -- what a device wants -----------------------------------------------------------------------------------------------


def test_a_device_refuses_smaller_cohorts_and_plain_questions_in_its_own_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = federation("gradient", tmp_path, capacities="1x")
    nodes.grid.contexts[1].node_config["min-cohort"] = 9
    nodes.run(num_rounds=1)
    assert "a cohort of 8 devices; needed: at least 9" in caplog.text
    assert nodes.strategy.progress.rejections.counts == {"no keys or shares": 2}  # in training, and when judging
    plain = in_process(
        data(), secure_settings("gradient").with_changes({"privacy.level": "plain"}), USERS, tmp_path / "2"
    )
    plain.grid.contexts[1].node_config["privacy"] = "secure"
    plain.run(num_rounds=1)
    assert "a request for a reply without masks" in caplog.text
    assert plain.strategy.progress.rejections.counts == {"the device failed": 2}


@pytest.mark.parametrize("case", ["gradient", "co_occurrence"])
def test_what_a_device_sent_under_masks_it_does_not_send_in_plain(
    case: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Enrolled for anything, 12 of 12 devices answered a secure run and then a plain one."""
    federation(case, tmp_path, capacities="1x").run(num_rounds=1)
    first, *others = sorted(tmp_path.rglob("privacy"))
    assert len(others) == USERS - 1
    assert first.read_text().startswith("secure ")
    for path in others:  # their owners allow it again
        path.unlink()
    plain = secure_settings(case, capacities="1x").with_changes({"privacy.level": "plain"})
    caplog.clear()
    nodes = in_process(data(case=case), plain, USERS, tmp_path)
    nodes.run(num_rounds=1)
    assert "a request for a reply without masks; needed: secure sums alone (privacy='secure')" in caplog.text
    assert nodes.strategy.progress.rejections.counts["the device failed"] >= 1
    assert list(tmp_path.rglob("privacy")) == [first]


@pytest.mark.parametrize("content", ["", "plain", "secure 00000000\n", "none 3ba1f23c\n"])
def test_a_damaged_file_of_the_level_served_is_refused(content: str, tmp_path: Path) -> None:
    assert served_privacy(tmp_path) == "plain"
    remember_privacy(tmp_path, "private")
    remember_privacy(tmp_path, "secure")
    assert served_privacy(tmp_path) == "private", "the highest counts"
    (tmp_path / "privacy").write_text(content)
    with pytest.raises(InvalidState, match="Remove the file"):
        served_privacy(tmp_path)


def test_a_server_that_goes_on_from_an_older_checkpoint_asks_in_a_new_sum(tmp_path: Path) -> None:
    nodes = federation("gradient", tmp_path, rounds=3)
    nodes.run(num_rounds=2)
    nodes.strategy.progress.state = replace(nodes.strategy.progress.state, round_number=1)
    nodes.run(num_rounds=2)
    assert [report.num_clients for report in nodes.strategy.progress.history] == [8, 8, 8, 8]
    assert not nodes.strategy.progress.rejections.counts


def test_a_sum_that_the_server_repeats_is_refused_by_all(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same turn once more: no round comes of it, and the run ends with the reason."""
    monkeypatch.setattr(secure_round, "new_sequence_number", lambda: 5)
    nodes = federation("gradient", tmp_path, tries=2)
    with pytest.raises(InvalidState, match=r"round 2, tried 2 times .* no keys or shares"):
        nodes.run()
    assert [report.num_clients for report in nodes.strategy.progress.history] == [8]
    assert "train 1, turn 5 again, after 5 (a repeated cohort)" in caplog.text


def refused_by_all(nodes: Nodes) -> None:
    """No round comes of it."""
    with pytest.raises(InvalidState, match="round 1, tried 1 times without a usable update"):
        nodes.run(num_rounds=1)
    assert not nodes.strategy.progress.history


def test_settings_that_contradict_the_message_are_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A server that asks for a plain update under settings that promise sums."""

    def unveil(message: Message) -> None:
        if message.metadata.message_type == "train" and message.metadata.reply_to_message_id == "":
            facts = message.content[FACTS]
            assert isinstance(facts, ConfigRecord)
            del facts[SECURE]

    nodes = federation("gradient", tmp_path, inspect=unveil, tries=1)
    refused_by_all(nodes)
    assert "settings and a message that contradict each other" in caplog.text
    assert nodes.strategy.progress.rejections.counts == {"the device failed": 8}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"purpose": "train_once_more"}, "a sum for train_once_more 0 with the request train 0"),
        ({"round": 7}, "a sum for train 7 with the request train 0"),
        ({"run": 7}, "a sum for train 0 with the request train 0"),
        ({"min_cohort": 2}, "a sum over 2 devices where settings have 3"),
    ],
)
def test_a_sum_that_is_not_that_of_the_question_is_refused(
    change: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A server that would have the same question answered in several sums, by calling them otherwise."""

    def other(*facts: Any) -> Session:
        session = Session(*facts)
        return replace(session, **change) if session.purpose == "train" else session

    monkeypatch.setattr(secure_round, "Session", other)
    nodes = federation("gradient", tmp_path, tries=1)
    for context in nodes.grid.contexts.values():
        context.node_config["min-cohort"] = 2
    refused_by_all(nodes)
    assert reason in caplog.text
    assert nodes.strategy.progress.rejections.counts == {"the device failed": 8}


def test_default_privacy() -> None:
    plain = secure_settings("gradient").with_changes({"privacy.level": "plain"})
    found, notes = default_privacy(plain, 99, asked=False)
    assert not found.privacy.uses_secure_aggregation
    assert "99 devices are too few" in notes[0]
    found, notes = default_privacy(plain, 100, asked=False)
    assert found.privacy.uses_secure_aggregation
    assert "since 100 devices take part" in notes[0]
    assert not default_privacy(plain, 100, asked=True)[0].privacy.uses_secure_aggregation
    found, notes = default_privacy(secure_settings("gradient"), 12, asked=True)
    assert "below the usual 100" in notes[1]
    with pytest.raises(InvalidSettings, match=r"2 devices with privacy\.min_cohort=3"):
        default_privacy(secure_settings("gradient"), 2, asked=True)
    fedhm = secure_settings("paper").with_changes({"privacy.level": "plain", "subspace.method": "fedhm"})
    found, notes = default_privacy(fedhm, 200, asked=False)
    assert "plain, since secure aggregation does not go" in notes[0]


def test_a_fleet_chooses_privacy_for_each_run_without_a_setting(tmp_path: Path) -> None:
    plain = secure_settings("gradient").with_changes({"privacy.level": "plain"})
    open_ = ServerFolder.create(tmp_path / "open", plain, "localhost", port=9, items=30, privacy=False)
    assert not open_.has_privacy_settings()
    for devices, level in ((99, "plain"), (100, "secure"), (4, "plain")):
        (notes,) = open_.choose_privacy(devices)
        assert f"Privacy: {level}, since {devices} devices" in notes
        assert ServerFolder.open(tmp_path / "open").settings().privacy.level == level  # what the run's program reads
    given = ServerFolder.create(tmp_path / "given", plain, "localhost", port=9, items=30)
    assert given.has_privacy_settings()
    assert not given.choose_privacy(500)
    assert not given.settings().privacy.uses_secure_aggregation


@pytest.mark.parametrize(
    "array",
    [
        Array(numpy.zeros(8, dtype=numpy.uint32)),
        Array(numpy.zeros((2, 4), dtype=numpy.uint8)),
        Array("uint8", (2**40,), "numpy.ndarray", b"short"),
        Array("uint8", (3,), "torch.Tensor", bytes(9)),
        Array("uint8", (4,), "numpy.ndarray", bytes(9_000)),
    ],
)
def test_a_vector_that_is_none_is_refused_before_it_is_read(array: Array) -> None:
    facts = ConfigRecord({"version": VERSION})
    with pytest.raises(InvalidMessage):
        masked_in(RecordDict({SECURE: ArrayRecord({SECURE: array}), FACTS: facts}))
    with pytest.raises(InvalidMessage, match="not masked"):
        masked_in(RecordDict({SECURE: ArrayRecord({SECURE: array, "more": array}), FACTS: facts}))
    assert bytes(masked_in(pack_masked(b"words"))) == b"words"


@pytest.mark.parametrize("found", [None, 7, "text", [b"a"]])
def test_a_message_that_is_none_is_refused(found: Any) -> None:
    facts = ConfigRecord({"version": VERSION} | ({} if found is None else {SECURE: found}))
    with pytest.raises(InvalidMessage, match="no message of secure aggregation"):
        secure_in(RecordDict({FACTS: facts}))
    assert secure_in(pack_secure(b"keys")) == b"keys"
