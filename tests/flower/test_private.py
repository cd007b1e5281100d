"""Sums with noise over messages: the simulation's sums with devices' noise, and ledgers that no server changes."""

from collections.abc import Callable
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fairfold.config import Settings
from fairfold.config.fleet import DifferentialPrivacy
from fairfold.errors import InvalidSettings, InvalidState, RequestRefused
from fairfold.federation import federation as numbering
from fairfold.federation import noise, secure_sums
from fairfold.federation.noise import noise_multiplier, required_noise_std
from fairfold.flower import preparation as opening
from fairfold.flower import secure_aggregation as secure_round
from fairfold.flower import secure_client as secure_device
from fairfold.flower import wire
from fairfold.flower.messages import secure_in
from fairfold.flower.preparation import refuse_simulation_only
from fairfold.flower.protocol import KEYS
from fairfold.privacy.audit.auditor import load_for_replay
from fairfold.privacy.fixed_point import Encoding, FixedPointVector, Segment, add_modular
from fairfold.privacy.ledger import Ledger
from fairfold.privacy.noise import client_noise_sigma, min_survivors
from fairfold.privacy.secure.client import SecureClient
from fairfold.privacy.secure.messages import Session, parse_message
from fairfold.privacy.secure.server import Phase, SecureServer
from fairfold.runs.folder import read_json, run_of
from tests.flower.test_secure import data, no_update_is_seen
from tests.support.nodes import Nodes, as_devices, assert_same, in_process, simulated

USERS = 10
SUMS = {"counts": "statistics", "sum": "train"}
"""For what each sum is asked."""


def private_settings(epsilon: float = 8.0, smallest: int = 3, capacities: str = "1x-4x", tries: int = 1) -> Settings:
    return Settings(
        algorithm={"kind": "co_occurrence"},
        fleet={"capacities": capacities, "clients_per_round": None, "network": {"max_failed_rounds": tries}},
        privacy={"level": "private", "epsilon": epsilon, "min_cohort": smallest},
    )


def federation(folder: Path, **options: Any) -> Nodes:
    more = {key: options.pop(key) for key in ("epsilon", "smallest", "capacities", "tries") if key in options}
    options |= {"folder": options.pop("run_folder")} if "run_folder" in options else {}
    nodes = in_process(data(USERS), private_settings(**more), USERS, folder, **options)
    for context in nodes.grid.contexts.values():
        context.node_config |= {"privacy": "private", "epsilon": 8}
    nodes.start = {}  # who takes part decides how many items are correlated
    return nodes


def ledger(folder: Path, number: int, epsilon: float = 8.0) -> Ledger:
    return Ledger(folder / f"node-{number}" / "ledger", epsilon, 1e-5, 3)


class Noted:
    """The noise that clients add together, by purpose, and of which σ for how many owners of a segment."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.words: dict[str, FixedPointVector] = {}
        self.shares: set[tuple[str, int, int]] = set()
        self._purpose = ""
        add_noise_share, add_noise = secure_device.add_noise_share, noise.add_noise

        def reply_session(machine: SecureClient, *rest: Any) -> None:
            self._purpose = machine.session.purpose
            add_noise_share(machine, *rest)
            self._purpose = ""

        def adding(*given: Any) -> None:
            *_, words, _ = given
            before = words.copy()
            add_noise(*given)
            known = self.words.get(self._purpose, before[:0])
            total = numpy.zeros(max(len(known), len(words)), dtype=numpy.uint32)
            total[: len(known)] += known
            total[: len(words)] += words - before
            self.words[self._purpose] = total

        def sharing(sigma: float, devices: int) -> int:
            found = client_noise_sigma(sigma, devices)
            if self._purpose:
                self.shares.add((self._purpose, devices, found))
            return found

        monkeypatch.setattr(secure_device, "add_noise_share", reply_session)
        monkeypatch.setattr(noise, "add_noise", adding)
        monkeypatch.setattr(noise, "client_noise_sigma", sharing)

    def add_aggregate_noise(
        self, _settings: Settings, _encoding: Encoding, name: str, segment: Segment, _asked: int, _released: int,
        words: FixedPointVector, _draw: Any,
    ) -> FixedPointVector:  # fmt: skip
        """A simulation's sum with this noise in the place of its own."""
        return add_modular(words, self.words[SUMS[name]][segment.start : segment.stop])


def test_the_sums_are_those_of_the_simulation_with_the_devices_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[Message] = []
    nodes = federation(tmp_path / "devices", inspect=messages.append, run_folder=tmp_path / "run")
    with monkeypatch.context() as patch:
        noted = Noted(patch)
        state = nodes.run()
    for module in (secure_sums, numbering):
        monkeypatch.setattr(module, "add_aggregate_noise", noted.add_aggregate_noise)
    expected, world, _ = simulated(data(USERS), private_settings(), as_devices)
    assert_same(state.algorithm_state["sum"], expected.algorithm_state["sum"])
    assert numpy.array_equal(
        state.algorithm_state["statistics"]["counts"].numpy(), world.plan.public.statistics["counts"].numpy()
    )
    assert_same(state.full, expected.full)
    no_update_is_seen(messages)
    assert not any(message.metadata.message_type == "evaluate" for message in messages)  # a quality would cost more
    assert nodes.strategy.progress.history[-1].quality is None
    # Noise is that of the owners of each segment, enough of it if three in ten of these leave.
    settings, steps = private_settings(), 1 << 16
    assert {(purpose, owners) for purpose, owners, _ in noted.shares} == {
        ("statistics", 10),
        ("train", 10),
        ("train", 5),
    }
    for purpose, owners, share in noted.shares:
        wanted = required_noise_std(settings, {of: name for name, of in SUMS.items()}[purpose]) * steps
        assert wanted <= share * sqrt(min_survivors(owners)) <= 1.01 * wanted
    drawn = noted.words["train"].view(numpy.int32)[6:].astype(float)
    large = drawn[len(drawn) // 2 :]
    assert 0.8 < large.std() / (required_noise_std(settings, "sum") * steps) / sqrt(5 / 4) < 1.25  # five deviations
    # What it cost stands on every device, and in the run's folder.
    for number in range(USERS):
        entries = ledger(tmp_path / "devices", number).entries()
        assert [(one.release, one.devices) for one in entries] == [
            ("statistics", 10),
            ("train 0", 5 if number < 5 else 10),
        ]
        assert ledger(tmp_path / "devices", number).spent() == pytest.approx(8, rel=1e-6)
    result = read_json(tmp_path / "run" / "result.json", "Run it again.")
    assert result["privacy"]["epsilon"] == pytest.approx(8)
    assert result["privacy"]["unit"] == "one user's whole history"
    assert len(result["privacy"]["assumptions"]) >= 4
    assert "ε = 8, δ = 1e-05" in result["notes"][0]


def test_long_statistics_are_sent_in_windows_and_paid_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (wire, secure_device):
        monkeypatch.setattr(module, "WINDOW", 11)
    nodes = federation(tmp_path)
    nodes.run()
    entries = ledger(tmp_path, 0).entries()
    assert [(one.release, one.part) for one in entries] == [
        ("statistics", 0),
        ("statistics", 11),
        ("statistics", 22),
        ("train 0", 0),
    ]
    assert ledger(tmp_path, 0).spent() == pytest.approx(8, rel=1e-6)


def test_windows_that_overlap_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = federation(tmp_path)
    monkeypatch.setattr(opening, "item_windows", lambda _items: [range(20), range(10, 30)])
    with pytest.raises(InvalidState, match="the statistics before the first round, whose noisy sum is lost"):
        nodes.run()
    assert "statistics from item 10 on; needed: windows that do not overlap" in caplog.text
    assert len(ledger(tmp_path, 0).entries()) == 1


def lost(nodes: Nodes, *, paid: bool = True) -> None:
    """The run ends with what was lost, and no model: at once where devices have paid for it."""
    with pytest.raises(InvalidState, match="round 1, whose noisy sum is lost" if paid else "round 1, tried 1 times"):
        nodes.run()
    assert not nodes.strategy.progress.history


def test_its_run_can_be_audited(tmp_path: Path) -> None:
    """As `fairfold federate` leaves it, with a word on what data its devices have."""
    in_folder = tmp_path / "server" / "run"
    federation(tmp_path / "devices", run_folder=in_folder).run()
    with pytest.raises(InvalidSettings, match="whose data lies on its devices"):
        load_for_replay(run_of(tmp_path))
    (tmp_path / "data.toml").write_text('kind = "synthetic"\nusers = 10\nitems = 30\ninteractions_per_user = 4\n')
    settings, loaded = load_for_replay(run_of(tmp_path))
    assert isinstance(settings.privacy, DifferentialPrivacy)
    assert (loaded.num_users, loaded.num_items) == (10, 30)


# -- who leaves --------------------------------------------------------------------------------------------------------


def training_without(nodes: set[int]) -> Callable[[ClientApp], ClientApp]:
    """Nodes that give shares and then do not train."""

    def wrapped(app: ClientApp) -> ClientApp:
        def reply(message: Message, context: Context) -> Message:
            if message.metadata.message_type == "train" and context.node_id - 1 in nodes:
                raise RuntimeError("no electricity")
            return app(message, context)

        return cast(ClientApp, reply)

    return wrapped


@pytest.mark.parametrize(("leaving", "opened"), [({0, 1, 2}, True), ({0, 1, 2, 3}, False)])
def test_a_sum_is_opened_if_seven_in_ten_stay(leaving: set[int], opened: bool, tmp_path: Path) -> None:
    nodes = federation(tmp_path, capacities="1x", app=training_without(leaving))
    if opened:
        nodes.run()
        assert nodes.strategy.progress.history[-1].num_clients == 7
    else:
        lost(nodes)
    assert ledger(tmp_path, 9).spent() == pytest.approx(8, rel=1e-6)  # nobody knows what was opened
    assert ledger(tmp_path, 0).spent() < 4


def test_a_sum_that_nobody_has_paid_for_is_asked_for_again(tmp_path: Path) -> None:
    """Lost while keys were agreed on, statistics and a round: no vectors have left a device."""
    failing = {"statistics": 1, "train": 1}

    def wrapped(app: ClientApp) -> ClientApp:
        def reply(message: Message, context: Context) -> Message:
            if message.metadata.message_type == KEYS and context.node_id == 1:
                purpose = parse_message(Session, secure_in(message.content), None).purpose
                failing[purpose] -= 1
                if failing[purpose] == 0:
                    raise RuntimeError("no electricity")
            return app(message, context)

        return cast(ClientApp, reply)

    nodes = federation(tmp_path, capacities="1x", smallest=10, tries=3, app=wrapped)
    nodes.run()
    assert [report.num_clients for report in nodes.strategy.progress.history] == [10]
    assert failing == {"statistics": -1, "train": -1}
    assert [one.release for one in ledger(tmp_path, 0).entries()] == ["statistics", "train 0"]


def test_devices_do_not_sign_survivors_without_enough_noise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that would open the sum all the same."""
    nodes = federation(tmp_path, capacities="1x", app=training_without({0, 1, 2, 3}))
    close = SecureServer.close

    def lying(server: SecureServer) -> dict[int, bytes]:
        session = server.session
        if server.phase == Phase.VECTORS:
            server.session = replace(session, staying=0)
        try:
            return close(server)
        finally:
            server.session = session

    monkeypatch.setattr(SecureServer, "close", lying)
    lost(nodes)
    assert "6 devices left in segment 0; needed: at least 7, for which noise is sized" in caplog.text


# -- ledgers -----------------------------------------------------------------------------------------------------------


def test_a_second_run_is_refused_with_its_reason_on_both_sides(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    federation(tmp_path / "devices", run_folder=tmp_path / "first").run()
    again = federation(tmp_path / "devices", run_folder=tmp_path / "second")
    caplog.clear()
    with pytest.raises(InvalidState, match="the statistics before it are lost: 0 devices that gave keys"):
        again.run()
    assert caplog.text.count("BudgetSpent: 'statistics', which would bring ε to 8.475; needed: 8 at most") == USERS
    assert "BudgetSpent on the device: 'statistics', which would bring" in (tmp_path / "second" / "run.log").read_text()
    assert len(ledger(tmp_path / "devices", 3).entries()) == 2
    # One whose owner allows more takes part again; the others do not.
    nodes = federation(tmp_path / "devices", smallest=2)
    for number in (1, 2, 3):
        nodes.grid.contexts[number].node_config["epsilon"] = 100
    nodes.run()
    assert nodes.strategy.progress.history[-1].num_clients == 3


def test_a_device_has_a_smallest_cohort_of_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    nodes = federation(tmp_path / "devices", run_folder=tmp_path / "run", capacities="1x")
    nodes.grid.contexts[1].node_config["min-cohort"] = 11
    nodes.run()
    assert nodes.strategy.progress.history[-1].num_clients == 9
    assert "refused: a cohort of 10 devices; needed: at least 11" in caplog.text
    notes = "Refused on the device: a cohort of 10 devices; needed: at least 11"
    assert notes in (tmp_path / "run" / "run.log").read_text()
    assert not ledger(tmp_path / "devices", 0).entries()


def test_what_is_let_out_is_written_down_before_it_is_sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that dies between the two has spent budget on an update that was never aggregated."""
    mask, task = SecureClient.mask, list[str]()

    def dying(machine: SecureClient, words: FixedPointVector) -> bytes:
        if machine.session.purpose == "train":
            raise RuntimeError("no electricity")
        return mask(machine, words)

    monkeypatch.setattr(SecureClient, "mask", dying)
    nodes = federation(tmp_path, inspect=lambda message: task.append(message.metadata.message_type))
    lost(nodes)
    assert ledger(tmp_path, 0).spent() == pytest.approx(8, rel=1e-6)


def test_a_server_that_dies_after_the_statistics_does_not_ask_for_them_again(tmp_path: Path) -> None:
    class Killed(BaseException):
        pass

    def dies(*_given: Any, **_more: Any) -> Any:
        raise Killed

    nodes = federation(tmp_path / "devices", run_folder=tmp_path / "run")
    nodes.strategy._tasks = dies  # type: ignore[method-assign]
    with pytest.raises(Killed):
        nodes.run()
    nodes = federation(tmp_path / "devices", run_folder=tmp_path / "run", resume=True)
    nodes.run()
    assert nodes.strategy.progress.history[-1].num_clients == USERS
    assert len(ledger(tmp_path / "devices", 0).entries()) == 2


def test_a_damaged_ledger_lets_nothing_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "node-0" / "ledger" / "ledger.json"
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    nodes = federation(tmp_path)
    nodes.run()
    assert nodes.strategy.progress.history[-1].num_clients == 9
    assert "releases nothing more" in caplog.text


# -- servers that lie --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"sigma": 0.9}, "noise of 0.9 for 70 % of devices"),  # more, to spare the ledger: settings say less
        ({"sigma": 0.0}, "an invitation to a sum without noise"),
        ({"staying": 69}, "for 69 % of devices; needed"),
    ],
)
def test_a_session_with_other_noise_than_its_settings_is_refused(
    change: dict[str, Any],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def other(*facts: Any) -> Session:
        session = Session(*facts)
        return replace(session, **change) if session.purpose == "train" else session

    monkeypatch.setattr(secure_round, "Session", other)
    nodes = federation(tmp_path)
    lost(nodes, paid=change.get("sigma") != 0.0)
    assert reason in caplog.text
    assert [one.release for one in ledger(tmp_path, 0).entries()] == ["statistics"]


def test_a_device_that_wants_noise_takes_part_in_no_exact_sum(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    exact = private_settings().with_changes({"privacy.level": "secure", "privacy.min_cohort": 3})
    nodes = in_process(data(USERS), exact, USERS, tmp_path)
    for context in nodes.grid.contexts.values():
        context.node_config["privacy"] = "private"
    with pytest.raises(InvalidState, match="the statistics before it are lost: 0 devices that gave keys"):
        nodes.run()
    assert "an invitation to a sum without noise; needed: noisy sums alone" in caplog.text


def test_statistics_that_are_not_released_with_noise_are_not_sent() -> None:
    assert noise_multiplier(private_settings(), ["counts", "users"]) > noise_multiplier(private_settings(), ["sum"])
    with pytest.raises(RequestRefused, match="'quality' in a sum with noise"):
        noise_multiplier(private_settings(), ["quality"])


def test_qualities_are_not_asked_for_and_refused_where_they_are(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = federation(tmp_path)
    nodes.strategy.evaluate = True
    nodes.run()
    assert "a request for qualities where sums have noise" in caplog.text
    assert nodes.strategy.progress.history[-1].quality is None


def test_an_update_larger_than_the_noise_allows_is_not_sent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    encode = Encoding.encode
    monkeypatch.setattr(Encoding, "encode", lambda *given, **more: encode(*given, **more) * numpy.uint32(2))
    with pytest.raises(InvalidState, match="the statistics before the first round, whose noisy sum is lost"):
        federation(tmp_path).run()
    assert "of 1 users; needed: 1 per user: noise is sized for it" in caplog.text


def test_noise_of_a_server_is_not_for_networks() -> None:
    with pytest.raises(InvalidSettings, match=r"privacy\.noise='server'"):
        refuse_simulation_only(private_settings().with_changes({"privacy.noise": "server"}))


@pytest.mark.parametrize(("key", "given"), [("epsilon", 0), ("epsilon", "much"), ("delta", 1.0), ("privacy", "some")])
def test_options_of_a_device_are_validated(
    key: str, given: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    nodes = federation(tmp_path)
    nodes.grid.contexts[1].node_config[key] = given
    nodes.run()
    assert nodes.strategy.progress.history[-1].num_clients == 9
    assert f"{key}={given!r}; needed" in caplog.text
