"""Changes of single lines that no test had noticed: one test for each, by what the line is for."""

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import polars
import pytest
import torch
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, SECP384R1, generate_private_key
from flwr.proto.fleet_pb2 import PullMessagesResponse, PushMessagesRequest
from flwr.proto.message_pb2 import Message as FlowerMessage
from flwr.proto.message_pb2 import Metadata as MessageMetadata
from flwr.proto.message_pb2 import ObjectTree

from fairfold.data import Interactions
from fairfold.data.files import head
from fairfold.data.formats import Options
from fairfold.data.tables import UNRATED, _select_rated
from fairfold.device.exchange import PulledMessage
from fairfold.device.masked import DeviceEncoding
from fairfold.errors import FairfoldError, InvalidState, RequestRefused
from fairfold.estimator.fitting import _settings
from fairfold.estimator.inputs import _series
from fairfold.federation.algorithm import mean_change
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round, sequential
from fairfold.federation.scheduling import CLOCK
from fairfold.federation.simulation import _never_drawn_notes
from fairfold.federation.updates import Aggregate, ClientTask, Update
from fairfold.flower.fleet.node_loop import _say
from fairfold.flower.fleet.training import RunFollower
from fairfold.methods.fair import _largest_on_chain
from fairfold.metrics import rating
from fairfold.metrics.ranking import _novelty
from fairfold.metrics.rating import BiasedMF
from fairfold.nn.footprint import footprint
from fairfold.privacy.audit.membership import _first_is_higher
from fairfold.privacy.audit.reconstruction import UpdateReader, _from_products, score_decoding
from fairfold.privacy.secure.keys import Identity, Trust, new_secret, public_of, read_enrolled
from fairfold.privacy.secure.masking import Ring
from fairfold.privacy.secure.messages import Advert
from fairfold.runs.folder import LOG
from fairfold.subspace import Capacity, Subspace
from fairfold.subspace.projection import Hashed, whole
from tests.support.audit import ITEMS, audited_settings, devices_of
from tests.support.federations import after_rounds, tiny_data, tiny_settings

SESSION = bytes(32)


def advert(name: int) -> Advert:
    identity = Identity.create(name, generate_private_key(SECP384R1()))
    return identity.advert(SESSION, public_of(new_secret()), public_of(new_secret()))


def test_a_key_that_was_seen_first_is_recorded() -> None:
    trust, first = Trust(), advert(7)
    trust.check(SESSION, (first, advert(8)))
    assert trust.seen[7] == first.enrolled
    trust.check(SESSION, (first,))
    with pytest.raises(RequestRefused, match="another key than before"):
        trust.check(SESSION, (advert(7),))


def test_an_enrolled_key_of_another_curve_is_refused(tmp_path: Path) -> None:
    form = serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH, serialization.NoEncryption()
    (tmp_path / "key").write_bytes(generate_private_key(SECP256R1()).private_bytes(*form))
    with pytest.raises(InvalidState, match="another kind of key"):
        read_enrolled(tmp_path / "key")


def test_the_first_update_is_not_changed_by_those_that_are_added() -> None:
    task = ClientTask(0, 0, {"t": whole((3, 1))}, {"t": torch.zeros(3)})
    updates = [Update({"t": torch.full((3,), float(number))}, 1.0) for number in (1, 2, 4)]
    aggregate = Aggregate()
    for update in updates:
        aggregate.add(task, update)
    ((_, total),) = aggregate.parts()
    assert total.sums["t"].tolist() == [7.0] * 3
    assert [float(update.sums["t"][0]) for update in updates] == [1.0, 2.0, 4.0]


def test_ids_of_mixed_types_become_text() -> None:
    assert _series("item", [1, "b", None, 2.5]).to_list() == ["1", "b", None, "2.5"]
    assert _series("item", [1, 2]).dtype == polars.Int64


def test_a_late_joiner_smaller_than_all_halves_the_smallest_subspace() -> None:
    chain = [Subspace(1000, 64, 5, "chunk", 4), Subspace(1000, 128, 5, "chunk", 4)]
    for limit, expected in ((64, 64), (63, 32), (32, 32), (20, 16), (300, 256)):
        found = _largest_on_chain(chain, Capacity(budget=4 * limit), one_tail=False)
        assert found is not None
        assert found.size == expected
        assert found.size <= limit
    assert _largest_on_chain(chain, Capacity(budget=4 * 3), one_tail=False) is None, "less than a chunk"


def test_equal_ratings_have_a_scale() -> None:
    train = Interactions.from_pairs(
        torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1]), 2, 2, ratings=torch.tensor([4.0, 4.0, 4.0])
    )
    model = BiasedMF(train, factors=2, penalty=0.1)
    model.epoch()
    assert torch.isfinite(model(torch.tensor([0, 1]), torch.tensor([0, 0]))).all()


def test_sums_of_slots_refuse_what_is_no_vector() -> None:
    subspace = Subspace(10, 4, 1, "chunk", 2)
    for wrong in (torch.full((10,), torch.nan), torch.zeros(9)):
        with pytest.raises(FairfoldError):
            subspace.sums_and_counts(wrong)


def test_the_longest_history_that_was_read_chooses_first() -> None:
    histories = {1: torch.tensor([1, 2, 3, 4]), 2: torch.tensor([1, 2, 9])}
    found = [torch.tensor([1, 2]), torch.tensor([1, 2, 3, 4])]
    score = score_decoding(found, histories)
    assert score.users == {1: 1, 0: 2}
    assert score.shares == {1: 1.0, 2: pytest.approx(2 / 3)}


def test_a_hashed_tensor_is_whole_by_slots_and_signs() -> None:
    subspace = Subspace(12, 4, 3, "chunk", 2)
    held, compact = Hashed((6, 2), subspace), torch.arange(1.0, 5.0)
    slots, signs = subspace.slots(0, 12)
    assert (signs < 0).any()
    assert (signs > 0).any()
    assert held.whole(compact).tolist() == (compact[slots] * signs).tolist()
    assert held.whole(compact).tolist() == held.rows(compact, torch.arange(6)).reshape(-1).tolist()


def test_survivors_that_lost_a_whole_side_are_isolated() -> None:
    """In a ring of 200, a member whose neighbors on one side alone have left is found, wherever it stands."""
    members = list(range(200))
    ring = Ring(bytes(32), members)
    assert ring.isolated(set(members)) is None
    half = ring.degrees.degree // 2
    for place in (0, 77, 199):
        for direction in (1, -1):
            gone = {ring.order[(place + direction * step) % 200] for step in range(1, half + 1)}
            assert ring.isolated(set(members) - gone) is not None


def test_rows_of_factors_are_read_as_the_rows_of_their_products() -> None:
    """A change of two factors changes the product by what it adds to it, not by the product of changes."""
    plan: dict[str, Any] = {"subspace.method": "fedhm", "fleet.capacities": "1x-2x", "algorithm.local_lr": 0.1}
    devices, _ = devices_of(audited_settings("gradient", **plan))
    seen = next(one for one in devices.updates(list(range(60))) if not one.task.projections["item.weight"].linear)
    held, before = seen.task.projections["item.weight"], seen.task.vectors["item.weight"]
    change = mean_change(
        devices.sampler.plan.algorithm, seen.task, "item.weight", seen.update.sums["item.weight"], seen.update.weight
    )
    expected = (held.recover(before + change) - held.recover(before)).view(ITEMS, -1)
    torch.testing.assert_close(UpdateReader(devices).rows(seen), expected)
    assert expected.abs().max() > 0


@pytest.mark.parametrize("asynchronous", [{}, {"asynchronous": {"buffer_size": 2}, "latency": {"median_seconds": 1.0}}])
def test_a_run_says_how_many_devices_were_never_drawn(asynchronous: dict[str, Any]) -> None:
    settings = tiny_settings(clients_per_round=2, rounds=2, **asynchronous)
    federation = Federation.of(settings, tiny_data(users=12))
    state = after_rounds(federation, federation.initial(), 2)
    if asynchronous:
        drawn = int(state.algorithm_state[CLOCK]["drawn"].sum())
        assert 2 < drawn < 12
    else:
        drawn = len({int(user) for number in range(2) for user in federation.sampler.cohort(number)})
    (note,) = _never_drawn_notes(federation, state)
    assert note.startswith(f"{12 - drawn} of 12 devices were never drawn.")
    everybody = Federation.of(tiny_settings(clients_per_round=12), tiny_data(users=12))
    assert _never_drawn_notes(everybody, after_rounds(everybody, everybody.initial())) == []


def test_a_refused_update_is_logged_with_its_round_and_client(caplog: pytest.LogCaptureFixture) -> None:
    federation = Federation.of(tiny_settings(faults={"nan": 1.0}), tiny_data())
    rejections, state = Rejections(), federation.initial()
    cohort = federation.sampler.cohort(0)
    with caplog.at_level("WARNING", "fairfold"):
        run_round(state, federation.sampler, federation.clients, rejections, sequential)
    assert rejections.counts == {"NaN or infinity": len(cohort)}
    expected = {f"round 1: client {int(client)} left out: NaN or infinity" for client in cohort}
    assert {record.getMessage() for record in caplog.records} == expected


def test_the_start_of_a_file_keeps_lines_that_end_in_both(tmp_path: Path) -> None:
    path = tmp_path / "lines.csv"
    path.write_bytes(b"user,item\r\n1,2\r\n")
    assert head(path) == b"user,item\r\n1,2\r\n"
    path.write_bytes(b"user,item\r1,2\r")
    assert head(path) == b"user,item\n1,2\n"


@pytest.mark.parametrize("given", [{"data": {"name": "mine"}}, {"data.name": "mine"}])
def test_a_fit_keeps_the_name_of_its_data(given: dict[str, Any]) -> None:
    nothing = dict.fromkeys(("capacities", "recipe", "method", "rounds", "seed"))
    assert _settings(Path("other.csv"), None, **nothing, settings=given).data.name == "mine"
    assert _settings(Path("other.csv"), None, **nothing, settings={}).data.name == "other.csv"


def test_serving_takes_the_vector_and_the_rows_of_a_batch() -> None:
    small, large = footprint(1_000, 16, 10, 20), footprint(1_000, 16, 30, 20)
    temporary = 128 * 16 * 20
    assert large.serving - small.serving == 4 * 16 * 20 + temporary
    assert small.serving == 4 * 1_000 + 4 * 16 * 10 + 128 * 10 * 16


def test_a_product_that_only_one_member_has_is_read() -> None:
    vector = torch.zeros(20, dtype=torch.float64)
    vector[[2, 3, 5, 7, 11, 13]] = 0.4
    rows, columns = torch.tril_indices(20, 20)
    (found,) = _from_products(torch.outer(vector, vector)[rows, columns], 0.01, 0.0)
    assert found.tolist() == [2, 3, 5, 7, 11, 13]


def test_room_for_noise_is_that_of_the_noisiest_sum() -> None:
    steps, clients = {"a": 16, "b": 16}, 100
    both = DeviceEncoding(steps, clients, {"a": 1.0, "b": 9.0}).max_value
    assert both == DeviceEncoding(steps, clients, {"b": 9.0}).max_value
    assert both < DeviceEncoding(steps, clients, {"a": 1.0}).max_value


def test_early_stopping_names_the_epoch_of_the_smallest_error(monkeypatch: pytest.MonkeyPatch) -> None:
    errors = iter([3.0, 2.0, 1.0, *[2.0] * 1_000])
    monkeypatch.setattr(rating, "evaluate_ratings", lambda *_: next(errors))
    held = Interactions.from_pairs(torch.tensor([0]), torch.tensor([0]), 1, 1)
    model: Any = SimpleNamespace(epoch=lambda: None)
    assert rating._early_stopping(model, held) == (1.0, 3)


def test_of_two_equal_scores_each_is_first_half_of_the_time() -> None:
    assert [_first_is_higher(*pair) for pair in ((1, 2), (2, 2), (2, 1))] == [0.0, 0.5, 1.0]


def test_nobody_is_asked_where_all_are_busy() -> None:
    settings = tiny_settings(clients_per_round=2)
    sampler = Federation.with_numbered_items(settings, tiny_data(1, 5)).sampler
    assert sampler.cohort(0, busy=[0, 3]).tolist() == []
    assert len(sampler.cohort(0, busy=[0])) == 1


def test_what_a_node_says_reaches_its_owner(capsys: pytest.CaptureFixture[str]) -> None:
    _say("connected \x1b[2J")
    printed = capsys.readouterr().err
    assert printed.startswith("connected ")
    assert "\x1b" not in printed


def test_the_lines_of_a_servers_log_that_matter_are_shown(tmp_path: Path) -> None:
    shown: list[str] = []
    server: Any = SimpleNamespace(run=tmp_path, completed_rounds=list)
    follower = RunFollower(server, shown.append, lambda *_: None)
    lines = [json.dumps({"message": "device 7 joins: 1x"}), "12:00 INFO fairfold device 8 left out: wrong size", "else"]
    (tmp_path / LOG).write_text("".join(f"{line}\n" for line in lines))
    follower.show_new()
    assert shown == ["device 7 joins: 1x", "device 8 left out: wrong size"]


def test_a_device_that_has_no_reply_says_so_in_flowers_words() -> None:
    """The reason of a failure is in the field in which Flower looks for it."""
    sent: dict[str, bytes] = {}

    def call(name: str, body: bytes) -> bytes:
        sent[name] = body
        return b""

    metadata = MessageMetadata(
        run_id=1, message_id="m", src_node_id=1, dst_node_id=2, message_type="train", ttl=60.0, created_at=1.0
    )
    pulled = PullMessagesResponse(
        messages_list=[FlowerMessage(metadata=metadata)], message_object_trees=[ObjectTree(object_id="m")]
    )
    PulledMessage(call, pulled.SerializeToString()).send("no such task", 0.5)
    (message,) = PushMessagesRequest.FromString(sent["push-messages"]).messages_list
    assert message.error.reason == "no such task"
    assert not message.HasField("content")


def test_novelty_is_the_mean_information_of_the_items_that_are_there() -> None:
    shares = torch.tensor([0.5, 0.25, 0.125])
    assert _novelty(torch.tensor([[0, 1], [2, -1]]), shares).tolist() == [1.5, 3.0]


def test_rows_without_a_rating_are_counted_as_left_out() -> None:
    frame = polars.DataFrame({"user": [1, 2], "item": [3, 4], "rating": [5.0, None]})
    repairs = Counter[str]()
    assert _select_rated(frame, Options(ratings=True), repairs).height == 1
    assert repairs[UNRATED] == 1
