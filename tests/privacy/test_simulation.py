"""Simulations in which the server sees sums alone: the same integers as over a network, and no sum of few devices."""

from typing import Any

import pytest
import torch

from fairfold.algorithms.rating_words import OF_ITEMS, OF_USERS, Words, units_of
from fairfold.backends.batched import batched
from fairfold.data import Dataset, Interactions
from fairfold.errors import InvalidSettings
from fairfold.flower.secure_sums import surveying
from fairfold.privacy.encoding import Heard
from fairfold.protocol.faults import Rejections
from fairfold.protocol.hearing import SecureHearing, stepped_down
from fairfold.protocol.noising import privacy_facts
from fairfold.protocol.plan import Plan
from fairfold.protocol.round import Backend, in_turn, run_round
from fairfold.protocol.words import Public, State
from fairfold.settings import Settings, read_settings
from fairfold.simulate.world import World
from tests.federations import tiny_data

USERS = 24
ALGORITHMS: dict[str, dict[str, Any]] = {
    "correlations": {"algorithm": {"kind": "correlations", "support": 1}, "run": {"rounds": 4}},
    "ratings": {"algorithm": "ratings"},
    "closed_form": {"algorithm": "closed_form"},
    "gradient": {"algorithm": {"kind": "gradient", "aggregation": "delta", "server_optimiser": "sgd"}},
    "gradient paper": {"algorithm": {"kind": "gradient", "aggregation": "paper", "weighting": "data"}},
}

TOLERANCES = {"correlations": (0, 0), "ratings": (2e-3, 1e-3)}
"""The numbers of one lie on the grid of the words; those of the other are said in steps of 1/128."""


def world_of(case: str, level: Any, capacities: str = "1x-2x", **more: Any) -> World:
    tables = ALGORITHMS[case] | {
        "fleet": {"capacities": capacities, "clients_per_round": None, **more},
        "privacy": level,
    }
    if case != "correlations":
        tables["model"] = {"kind": "mf", "factors": 3}
    return World.of(Settings(**tables), tiny_data(3, USERS, 30, ratings=case == "ratings"))


def states(world: World, backend: Backend, rounds: int = 3, rejections: Rejections | None = None) -> State:
    state = world.initial()
    for _ in range(rounds):
        state = run_round(state, world.fleet, world.people, rejections or Rejections(), backend)
    return state


def secure(least: int = 4, **more: Any) -> dict[str, Any]:
    return {"level": "secure", "smallest_cohort": least, **more}


@pytest.mark.parametrize("case", list(ALGORITHMS))
def test_sums_of_words_are_those_of_answers_up_to_rounding(case: str) -> None:
    sizes = "1x" if case == "correlations" else "1x-2x"  # where answers are seen, its small devices speak of more
    plain, words = (states(world_of(case, level, sizes), in_turn) for level in ("plain", secure()))
    for name, vector in plain.full.items():
        if name == "leaning":  # a regression on facts that hardly differ here: rounding turns it, and no row with it
            continue
        rtol, atol = TOLERANCES.get(case, (1e-3, 1e-4))
        assert torch.allclose(vector, words.full[name], rtol=rtol, atol=atol), name


def rated_world(level: Any, scale: float = 1.0, lowest: float = 1.0) -> World:
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
    return World.of(settings, Dataset("rated", train, train))


def left_over(world: World, state: State) -> float:
    """Squared errors of the ratings that were trained on, by their variance."""
    plan, train = world.plan, world.people.train
    assert train.ratings is not None
    predict = plan.algorithm.predictor(plan, state.full, plan.assignments(0), world.people)
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


def test_what_words_have_no_room_for_is_said_later() -> None:
    """Three rows that go together, of which words have room for a fifth, and one by itself."""
    meant, together = torch.tensor([[900.0, -3.0], [300.0, 0.3], [-80.0, 0.0], [17.013, 250.0]]), [4, 4, 4, 2]
    said, kept = Words(2**7, 2.0**9), torch.zeros(4, 2)
    for number in range(12):
        now = said.said(meant - kept, torch.tensor(together))
        assert torch.equal(now * 2**7, (now * 2**7).round())
        assert float(now[:3].sum(0).abs().max()) <= 2.0**9
        assert number or now[:3, 0].tolist() == pytest.approx([180, 60, -16], abs=0.01)  # in equal parts
        kept += now
    assert ((meant - kept).abs() <= 0.5 / 2**7).all()


def test_what_everybody_keeps_as_said_is_what_the_server_holds() -> None:
    """To the last digit; and it is what they mean but for half a step."""
    world, plain = rated_world("secure"), rated_world("plain")
    state = world.initial()
    for _ in range(4):
        before = state
        state = run_round(state, world.fleet, world.people, Rejections(), batched)
        said = world.people.private["users"].double().sum(0)
        torch.testing.assert_close(state.moments["sums"]["users"], said, rtol=0, atol=1e-9)
    plain.initial()
    plain.people.private.update({name: of.clone() for name, of in world.people.private.items()})
    sent = world.plan.algorithm.send(world.plan, before, [0])[0]
    meant, kept = (of.plan.algorithm.answer(of.plan, sent, of.people.client(5, 0))[1] for of in (plain, world))
    step = 1 / (OF_USERS.steps * units_of(3))
    assert ((meant["users"] - kept["users"]).abs() <= step * 0.51).all()
    assert ((meant["last"] - kept["last"]).abs() <= 0.51 / OF_ITEMS.steps).all()


def test_ratings_that_words_have_no_room_for_are_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"a rating of 5000 .*ratings from -100 to 100.*divide them all"):
        rated_world("secure", 1000.0, 0.0)
    rated_world("plain", 1000.0)


@pytest.mark.parametrize("devices", [100, 32_767])
def test_the_survey_of_ratings_fits_into_words(devices: int) -> None:
    """Somebody with 2,000 ratings from 0 to 100 says in part how many and how large they are; no number is clipped."""
    settings = rated_world("secure").plan.settings
    source = torch.Generator().manual_seed(1)
    given = torch.randint(0, 101, (2000,), generator=source).float()
    heavy = Interactions.from_pairs(torch.zeros(2000, dtype=torch.int64), torch.arange(2000), 1, 2000, given)
    said = settings.algorithm.survey(settings, heavy, range(2000))
    encoding = surveying(settings, range(2000), devices)
    (segment,) = encoding.layout.segments
    heard = encoding.decode({segment: encoding.encode(Heard(said), 0)})[0].answer.sums
    assert all(torch.equal(of, heard[name]) for name, of in said.sums.items())  # they lie on the grid
    many, total, squares = heard["rated"].tolist()
    assert 5 <= many < 20
    assert total / many == pytest.approx(float(given.mean()), rel=0.1)
    assert squares / many == pytest.approx(float(given.square().mean()), rel=0.1)


@pytest.mark.parametrize("case", ["correlations", "gradient", "ratings"])
def test_all_backends_give_the_same_words(case: str) -> None:
    first, second = (states(world_of(case, secure()), backend) for backend in (in_turn, batched))
    for name, vector in first.full.items():
        assert torch.allclose(vector, second.full[name], rtol=1e-5, atol=1e-6), name
    if case == "correlations":
        for moment, kept in first.moments.items():
            assert all(torch.equal(of, second.moments[moment][name]) for name, of in kept.items()), moment


def test_a_sum_of_too_few_devices_is_not_opened_and_nobody_keeps_its_word(monkeypatch: pytest.MonkeyPatch) -> None:
    world, rejections = world_of("correlations", secure(13), faults={"drop": 0.5}), Rejections()
    monkeypatch.setattr(type(world.fleet), "faults", lambda *_: dict.fromkeys(range(12), "drop"))
    state = states(world, batched, 1, rejections)
    assert rejections.counts == {"no answer in time": 12, "a sum of fewer than 13 devices": 12}
    assert not state.full["rows"].any()
    assert not world.people.private["said"].any()


def test_fewer_devices_than_the_minimum_are_refused_at_once() -> None:
    with pytest.raises(InvalidSettings, match=f"{USERS} of {USERS} devices per round with privacy.smallest_cohort=100"):
        world_of("correlations", "secure")
    with pytest.raises(InvalidSettings, match="60 of 120 devices per round"):  # nobody wrote the 60
        World.of(Settings(algorithm="closed_form", fleet={"capacities": "1x"}, privacy="secure"), tiny_data(3, 120, 30))
    with pytest.raises(InvalidSettings, match=r"fleet.clients_per_round=20.*ask more devices"):
        read_settings({"privacy": "secure", "fleet": {"clients_per_round": 20}})


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"algorithm": "central"}, "nothing to hide in a sum"),
        ({"algorithm": "gradient", "subspace": "fedhm"}, "no sums"),
        ({"algorithm": "gradient", "subspace": "inconsistent"}, "no sums"),
        ({"fleet": {"replacement": True, "clients_per_round": 200}}, "speaks once"),
        ({"privacy": {"level": "secure", "bound": 2.0}}, "unknown key 'privacy.bound' with correlations"),
        ({"algorithm": "ratings", "privacy": {"level": "secure", "bound": 2.0}}, "unknown key 'privacy.bound'"),
        ({"privacy": {"level": "plain", "bound": 2.0}}, "unknown key 'privacy.bound' with privacy.level='plain'"),
    ],
)
def test_what_cannot_be_a_sum_is_refused(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        read_settings({"privacy": "secure"} | tables)


def test_a_thin_size_steps_down_until_it_is_hidden() -> None:
    sizes = torch.tensor([0] * 3 + [1] * 4 + [2] * 9)
    assert stepped_down(sizes, [0, 1, 2], 3).bincount().tolist() == [3, 4, 9]
    assert stepped_down(sizes, [0, 1, 2], 5).bincount().tolist() == [0, 7, 9]
    assert stepped_down(sizes, [0, 1, 2], 8).bincount().tolist() == [0, 0, 16]
    assert stepped_down(sizes, [2, 1, 0], 10).bincount(minlength=3).tolist() == [3, 13, 0]
    assert world_of("correlations", secure(), "1x-2x-4x", shares=(1, 1, 1)).fleet.size.bincount().tolist() == [8, 8, 8]
    thin = world_of("correlations", secure(), "1x-2x-4x", shares=(1, 11, 12))
    assert thin.fleet.size.bincount().tolist() == [0, 12, 12]


def test_a_few_clipped_numbers_stay_at_the_bound() -> None:
    world = world_of("gradient", secure(bound=1e-6))
    before = world.initial().full
    after = states(world, in_turn, 1).full
    assert all((after[name] - before[name]).abs().max() <= 1.1e-6 for name in before)


def test_a_lowered_minimum_is_told() -> None:
    assert "below the usual 100" in Settings(privacy=secure(20)).privacy.warnings()[0]
    assert not Settings(privacy="secure").privacy.warnings()


def test_a_cohort_is_heard_through_words() -> None:
    world = world_of("correlations", secure())
    assert isinstance(SecureHearing(world.people, {0: 5}).apart([1, 2], {2: "drop"}), dict)
    assert SecureHearing(world.people, {0: 5}).apart([1, 2], {2: "drop"}) == {2: "drop"}
    others = world_of("gradient", secure())
    assert SecureHearing(others.people, {0: 5}).apart([1, 2], {2: "drop"}) == {1: "", 2: "drop"}


def test_what_exact_sums_leave_out_is_told() -> None:
    def told(level: Any, kind: str = "correlations", **more: Any) -> str:
        return " ".join(privacy_facts(Settings(algorithm={"kind": kind} | more, privacy=level))["warnings"])

    assert "Items that fewer than 10 users of a sum of 100 or more are expected to have are not spoken of" in told(
        "secure"
    )
    assert "fewer than 3 users of a sum of 100 or more are expected to have (10 are usual)" in told("secure", crowd=3)
    assert "of smaller sums in proportion" in told(secure(20))
    assert "spoken of" not in told("secure", "ratings") + told("private")
    assert not told("plain")


@pytest.mark.parametrize(
    ("privacy", "drawn", "least"),
    [
        ("plain", None, 3), ("secure", None, 10), ("secure", 100, 100), (secure(20), None, 10), (secure(20), 50, 100),
        ({"level": "secure", "smallest_cohort": 300}, 500, 20),
    ],
)  # fmt: skip
def test_a_sum_speaks_of_items_that_enough_of_it_are_expected_to_have(
    privacy: Any, drawn: int | None, least: int
) -> None:
    """Of 1,000 users one has the item 0, two the item 1, and so on, in the order of popularity."""
    settings = Settings(
        algorithm="correlations", privacy=privacy, fleet={"clients_per_round": drawn, "capacities": "1x"}
    )
    counts = torch.arange(400, 0, -1).double()
    survey = {"counts": counts, "users": torch.tensor([1000.0, 1e4, 0.0])}
    held = Plan.of(settings, Public(400, 1000, survey)).architecture
    assert held.tables["rows"][0] == int((counts >= least).sum())
