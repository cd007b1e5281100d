"""Simulations in which the server sees sums alone: the same integers as over a network, and no sum of few devices."""

from typing import Any

import pytest
import torch

from fairfold.algorithms.rating_updates import ITEM_FIXED_POINT, USER_FIXED_POINT, FixedPoint, statistic_units
from fairfold.backends.batched import batched
from fairfold.config import Settings, read_settings
from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings
from fairfold.federation.aggregation import merge_small_groups
from fairfold.federation.algorithm import PredictsRatings
from fairfold.federation.federation import Federation
from fairfold.federation.plan import Plan, privacy_report
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import Backend, run_round, sequential
from fairfold.federation.secure_sums import SecureAggregator
from fairfold.federation.updates import PublicStatistics, State
from fairfold.flower.secure_aggregation import statistics_encoding
from fairfold.privacy.fixed_point import MeasuredUpdate
from tests.support.federations import tiny_data

USERS = 24
ALGORITHMS: dict[str, dict[str, Any]] = {
    "co_occurrence": {"algorithm": {"kind": "co_occurrence", "support": 1}, "run": {"rounds": 4}},
    "ratings": {"algorithm": "ratings"},
    "closed_form": {"algorithm": "closed_form"},
    "closed_form by Newton steps": {
        "algorithm": {"kind": "closed_form", "server_optimizer": "newton", "server_lr": 1.0}
    },
    "gradient": {"algorithm": {"kind": "gradient", "aggregation": "delta", "server_optimizer": "sgd"}},
    "gradient paper": {"algorithm": {"kind": "gradient", "aggregation": "paper", "weighting": "data"}},
}

TOLERANCES = {"co_occurrence": (0, 0), "ratings": (2e-3, 1e-3)}
"""The numbers of one lie on the grid of the words; those of the other are said in steps of 1/128."""


def private_federation(case: str, level: Any, capacities: str = "1x-2x", **more: Any) -> Federation:
    tables = ALGORITHMS[case] | {
        "fleet": {"capacities": capacities, "clients_per_round": None, **more},
        "privacy": level,
    }
    if case != "co_occurrence":
        tables["model"] = {"kind": "mf", "factors": 3}
    return Federation.of(Settings(**tables), tiny_data(3, USERS, 30, ratings=case == "ratings"))


def states(world: Federation, backend: Backend, rounds: int = 3, rejections: Rejections | None = None) -> State:
    state = world.initial()
    for _ in range(rounds):
        state = run_round(state, world.sampler, world.clients, rejections or Rejections(), backend)
    return state


def secure(least: int = 4, **more: Any) -> dict[str, Any]:
    return {"level": "secure", "min_cohort": least, **more}


@pytest.mark.parametrize("case", list(ALGORITHMS))
def test_fixed_point_sums_are_the_plain_ones_up_to_rounding(case: str) -> None:
    sizes = "1x" if case == "co_occurrence" else "1x-2x"  # its small devices upload more where plain
    plain, words = (states(private_federation(case, level, sizes), sequential) for level in ("plain", secure()))
    for name, vector in plain.full.items():
        if name == "regression":  # a regression on facts that hardly differ here: rounding turns it, and no row with it
            continue
        rtol, atol = TOLERANCES.get(case, (1e-3, 1e-4))
        assert torch.allclose(vector, words.full[name], rtol=rtol, atol=atol), name


def rated_world(level: Any, scale: float = 1.0, lowest: float = 1.0) -> Federation:
    """300 users whose ratings two tastes explain: one has rated everything, some a single item."""
    source = torch.Generator().manual_seed(2)
    users, items = torch.randn(300, 2, generator=source), torch.randn(400, 2, generator=source)
    drawn = torch.rand(300, 400, generator=source) < 0.1
    drawn[0], drawn[1:20] = True, False
    drawn[1:20, :1] = True
    pairs = drawn.nonzero()
    scores = (users[pairs[:, 0]] * items[pairs[:, 1]]).sum(1) + 0.3 * torch.randn(len(pairs), generator=source)
    given = lowest + scale * (scores + 2.5).clamp(0, 5).round()
    train = Interactions.from_pairs(pairs[:, 0], pairs[:, 1], 300, 400, given)
    settings = Settings(
        algorithm="ratings", model={"factors": 4}, privacy=level, subspace={"reference_factors": 8},
        fleet={"capacities": "2x-16x", "clients_per_round": None}, run={"rounds": 24},
    )  # fmt: skip
    return Federation.of(settings, Dataset("rated", train, train))


def left_over(world: Federation, state: State) -> float:
    """Squared errors of the ratings that were trained on, by their variance."""
    plan, train = world.plan, world.clients.train
    assert train.ratings is not None
    predict = PredictsRatings.of(plan.algorithm).predictor(plan, state.full, plan.assignments(0), world.clients)
    errors = predict(train.users, train.items) - train.ratings
    return float(errors.square().mean() / train.ratings.var())


@pytest.mark.parametrize(("scale", "lowest"), [(1.0, 0.0), (2.0, 0.0), (20.0, 0.0), (0.1, -0.5)])
def test_ratings_of_any_scale_are_learned_as_well_through_words(scale: float, lowest: float) -> None:
    """Also by users of one rating, and of more than words have room for at once; errors do not add up over rounds."""
    found = {}
    for level in ("plain", "secure"):
        world = rated_world(level, scale, lowest)
        found[level] = left_over(world, states(world, batched, rounds=24))
    assert found["plain"] < 0.55
    assert found["secure"] < found["plain"] * 1.03


def test_what_fixed_point_has_no_room_for_is_sent_later() -> None:
    """Three rows that go together, of which words have room for a fifth, and one by itself."""
    meant, together = torch.tensor([[900.0, -3.0], [300.0, 0.3], [-80.0, 0.0], [17.013, 250.0]]), [4, 4, 4, 2]
    rounding, kept = FixedPoint(2**7, 2.0**9), torch.zeros(4, 2)
    for number in range(12):
        now = rounding.quantize(meant - kept, torch.tensor(together))
        assert torch.equal(now * 2**7, (now * 2**7).round())
        assert float(now[:3].sum(0).abs().max()) <= 2.0**9
        assert number or now[:3, 0].tolist() == pytest.approx([180, 60, -16], abs=0.01)  # in equal parts
        kept += now
    assert ((meant - kept).abs() <= 0.5 / 2**7).all()


def test_what_clients_remember_as_uploaded_is_what_the_server_holds() -> None:
    """To the last digit; and it is what they mean but for half a step."""
    world, plain = rated_world("secure"), rated_world("plain")
    state = world.initial()
    for _ in range(4):
        before = state
        state = run_round(state, world.sampler, world.clients, Rejections(), batched)
        expected = world.clients.local_state["users"].double().sum(0)
        torch.testing.assert_close(state.algorithm_state["sums"]["users"], expected, rtol=0, atol=1e-9)
    plain.initial()
    plain.clients.local_state.update({name: of.clone() for name, of in world.clients.local_state.items()})
    task = world.plan.algorithm.tasks(world.plan, before, [0])[0]
    meant, kept = (of.plan.algorithm.client_update(of.plan, task, of.clients.client(5, 0))[1] for of in (plain, world))
    step = 1 / (USER_FIXED_POINT.steps * statistic_units(3))
    assert ((meant["users"] - kept["users"]).abs() <= step * 0.51).all()
    assert ((meant["last_update"] - kept["last_update"]).abs() <= 0.51 / ITEM_FIXED_POINT.steps).all()


def test_ratings_that_words_have_no_room_for_are_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"a rating of 5000 .*ratings from -100 to 100.*divide them all"):
        rated_world("secure", 1000.0, 0.0)
    rated_world("plain", 1000.0)


@pytest.mark.parametrize("devices", [100, 32_767])
def test_the_statistics_of_ratings_fit_into_fixed_point(devices: int) -> None:
    """Somebody with 2,000 ratings from 0 to 100 says in part how many and how large they are; no number is clipped."""
    settings = rated_world("secure").plan.settings
    source = torch.Generator().manual_seed(1)
    given = torch.randint(0, 101, (2000,), generator=source).float()
    heavy = Interactions.from_pairs(torch.zeros(2000, dtype=torch.int64), torch.arange(2000), 1, 2000, given)
    update = settings.algorithm.client_statistics(settings, heavy, range(2000))
    encoding = statistics_encoding(settings, range(2000), devices)
    (segment,) = encoding.layout.segments
    decoded = encoding.decode({segment: encoding.encode(MeasuredUpdate(update), 0)})[0].update.sums
    assert all(torch.equal(of, decoded[name]) for name, of in update.sums.items())  # they lie on the grid
    many, total, squares = decoded["rating_totals"].tolist()
    assert 5 <= many < 20
    assert total / many == pytest.approx(float(given.mean()), rel=0.1)
    assert squares / many == pytest.approx(float(given.square().mean()), rel=0.1)


@pytest.mark.parametrize("case", ["co_occurrence", "gradient", "ratings"])
def test_all_backends_give_the_same_words(case: str) -> None:
    first, second = (states(private_federation(case, secure()), backend) for backend in (sequential, batched))
    for name, vector in first.full.items():
        assert torch.allclose(vector, second.full[name], rtol=1e-5, atol=1e-6), name
    if case == "co_occurrence":
        for moment, kept in first.algorithm_state.items():
            assert all(torch.equal(of, second.algorithm_state[moment][name]) for name, of in kept.items()), moment


def test_a_sum_of_too_few_devices_is_not_opened_and_no_client_remembers_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world, rejections = private_federation("co_occurrence", secure(13), faults={"drop": 0.5}), Rejections()
    monkeypatch.setattr(type(world.sampler), "faults", lambda *_: dict.fromkeys(range(12), "drop"))
    state = states(world, batched, 1, rejections)
    assert rejections.counts == {"no update in time": 12, "a sum of fewer than 13 clients": 12}
    assert not state.full["rows"].any()
    assert not world.clients.local_state["sync_state"].any()


def test_fewer_devices_than_the_minimum_are_refused_at_once() -> None:
    with pytest.raises(InvalidSettings, match=f"{USERS} of {USERS} devices per round with privacy.min_cohort=100"):
        private_federation("co_occurrence", "secure")
    with pytest.raises(InvalidSettings, match="60 of 120 devices per round"):  # nobody wrote the 60
        Federation.of(
            Settings(algorithm="closed_form", fleet={"capacities": "1x"}, privacy="secure"), tiny_data(3, 120, 30)
        )
    with pytest.raises(InvalidSettings, match=r"fleet.clients_per_round=20.*ask all clients"):
        read_settings({"privacy": "secure", "fleet": {"clients_per_round": 20}})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"algorithm": "central"}, "nothing to hide in a sum"),
        ({"algorithm": "gradient", "subspace": "fedhm"}, "not additive"),
        ({"algorithm": "gradient", "subspace": "inconsistent"}, "not additive"),
        ({"fleet": {"replacement": True, "clients_per_round": 200}}, "takes part once"),
        (
            {"privacy": {"level": "secure", "clip": 2.0}},
            "inactive key 'privacy.clip' with algorithm.kind='co_occurrence'",
        ),
        ({"algorithm": "ratings", "privacy": {"level": "secure", "clip": 2.0}}, "inactive key 'privacy.clip'"),
        ({"privacy": {"level": "plain", "clip": 2.0}}, "unknown key 'privacy.clip' with privacy.level='plain'"),
    ],
)
def test_what_cannot_be_a_sum_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        read_settings({"privacy": "secure"} | tables)


def test_a_thin_size_steps_down_until_it_is_hidden() -> None:
    sizes = torch.tensor([0] * 3 + [1] * 4 + [2] * 9)
    assert merge_small_groups(sizes, [0, 1, 2], 3).bincount().tolist() == [3, 4, 9]
    assert merge_small_groups(sizes, [0, 1, 2], 5).bincount().tolist() == [0, 7, 9]
    assert merge_small_groups(sizes, [0, 1, 2], 8).bincount().tolist() == [0, 0, 16]
    assert merge_small_groups(sizes, [2, 1, 0], 10).bincount(minlength=3).tolist() == [3, 13, 0]
    assert private_federation(
        "co_occurrence", secure(), "1x-2x-4x", shares=(1, 1, 1)
    ).sampler.size.bincount().tolist() == [
        8,
        8,
        8,
    ]
    thin = private_federation("co_occurrence", secure(), "1x-2x-4x", shares=(1, 11, 12))
    assert thin.sampler.size.bincount().tolist() == [0, 12, 12]


def test_a_few_clipped_numbers_stay_at_the_bound() -> None:
    world = private_federation("gradient", secure(clip=1e-6))
    before = world.initial().full
    after = states(world, sequential, 1).full
    assert all((after[name] - before[name]).abs().max() <= 1.1e-6 for name in before)


def test_a_lowered_minimum_is_in_the_notes() -> None:
    assert "below the usual 100" in Settings(privacy=secure(20)).privacy.warnings()[0]
    assert not Settings(privacy="secure").privacy.warnings()


def test_a_cohort_is_aggregated_in_fixed_point() -> None:
    world = private_federation("co_occurrence", secure())
    assert isinstance(SecureAggregator(world.clients, {0: 5}).separate_clients([1, 2], {2: "drop"}), dict)
    assert SecureAggregator(world.clients, {0: 5}).separate_clients([1, 2], {2: "drop"}) == {2: "drop"}
    others = private_federation("gradient", secure())
    assert SecureAggregator(others.clients, {0: 5}).separate_clients([1, 2], {2: "drop"}) == {1: "", 2: "drop"}


def test_what_exact_sums_leave_out_is_in_the_notes() -> None:
    def notes(level: Any, kind: str = "co_occurrence", **more: Any) -> str:
        return " ".join(privacy_report(Settings(algorithm={"kind": kind} | more, privacy=level))["warnings"])

    assert "Items that fewer than 10 users of a sum of 100 or more are expected to have are not uploaded" in notes(
        "secure"
    )
    assert "fewer than 3 users of a sum of 100 or more are expected to have (10 are usual)" in notes(
        "secure", min_item_users=3
    )
    assert "of smaller sums in proportion" in notes(secure(20))
    assert "are expected to have" not in notes("secure", "ratings") + notes("private")
    assert not notes("plain")


@pytest.mark.parametrize(
    ("privacy", "drawn", "least"),
    [
        ("plain", None, 3), ("secure", None, 10), ("secure", 100, 100), (secure(20), None, 10), (secure(20), 50, 100),
        ({"level": "secure", "min_cohort": 300}, 500, 20),
    ],
)  # fmt: skip
def test_a_sum_is_of_items_that_enough_of_it_are_expected_to_have(privacy: Any, drawn: int | None, least: int) -> None:
    """Of 1,000 users one has the item 0, two the item 1, and so on, in the order of popularity."""
    settings = Settings(
        algorithm="co_occurrence", privacy=privacy, fleet={"clients_per_round": drawn, "capacities": "1x"}
    )
    counts = torch.arange(400, 0, -1).double()
    statistics = {"counts": counts, "users": torch.tensor([1000.0, 1e4, 0.0])}
    held = Plan.of(settings, PublicStatistics(400, 1000, statistics)).architecture
    assert held.tables["rows"][0] == int((counts >= least).sum())
