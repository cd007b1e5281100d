"""Five hundred rounds of every algorithm: what was learned early is not lost late, and numbers stay small."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from fairfold.algorithms.rating_model import ROWS
from fairfold.algorithms.ratings import BayesianRatings
from fairfold.config import read_settings
from fairfold.data import Dataset, Interactions
from fairfold.data.synthetic import SyntheticDataset
from fairfold.federation.evaluation import Quality, RoundReport
from fairfold.federation.plan import Plan
from fairfold.federation.simulation import DIVERGED_EVALUATIONS, diverged, simulate, stop_reason
from fairfold.federation.updates import Aggregate, State

ROUNDS = 500

LARGEST = 1e4
"""No number of a model is larger: float32 still resolves hundredths of a thousandth."""

ALGORITHMS: dict[str, dict[str, Any]] = {
    "closed form": {"algorithm": {"kind": "closed_form"}, "model": {"factors": 8}},
    "gradient": {"algorithm": {"kind": "gradient"}, "model": {"factors": 8}},
    "ratings": {"algorithm": {"kind": "ratings"}, "model": {"factors": 4}},
    "streamed ratings": {"algorithm": {"kind": "ratings", "streamed": True}, "model": {"factors": 4}},
    "central": {"algorithm": {"kind": "central"}, "model": {"factors": 8}},
}

EXACT = {"ratings", "streamed ratings", "central"}
"""These end where they were best; the others go on fitting 16 items of each user by random negatives, and lose some."""

OVERFITS = 0.04


def world() -> Dataset:
    """Users with tastes, and ratings that follow them."""
    return SyntheticDataset(users=40, items=80, interactions_per_user=16, taste_strength=2.0, seed=11).dataset()


def rated(data: Dataset) -> Dataset:
    source = torch.Generator().manual_seed(5)
    users = torch.randn(data.num_users, 2, generator=source)
    items = torch.randn(data.num_items, 2, generator=source)

    def with_ratings(part: Interactions) -> Interactions:
        meant = (
            3 + (users[part.users] * items[part.items]).sum(1) + 0.3 * torch.randn(len(part.items), generator=source)
        )
        given = meant.round().clamp(1, 5)
        return Interactions.from_pairs(part.users, part.items, part.num_users, part.num_items, given)

    return Dataset("rated", with_ratings(data.train), with_ratings(data.test))


def cases() -> list[Any]:
    """All cases if asked for; by default an algorithm that remembers updates, in mixed sizes, with few drawn."""
    found = []
    for name in ALGORITHMS:
        for capacities in ["1x", "1x-4x-16x"]:
            for drawn in [None, 7]:
                if name != "central" or (capacities == "1x" and drawn is None):  # all data in one place
                    quick = (capacities, drawn) == ("1x-4x-16x", 7) and name == "ratings"
                    marks = [] if quick else [pytest.mark.slow]
                    found.append(pytest.param(name, capacities, drawn, marks=marks))
    return found


@pytest.mark.parametrize(("name", "capacities", "drawn"), cases())
def test_a_long_run_ends_as_well_as_it_ever_was(name: str, capacities: str, drawn: int | None) -> None:
    fleet = {} if name == "central" else {"fleet": {"capacities": capacities, "clients_per_round": drawn}}
    chosen = read_settings(ALGORITHMS[name] | fleet | {"run": {"rounds": ROUNDS, "evaluate_every": 25}})
    data = rated(world()) if chosen.predicts_ratings else world()
    result = simulate(chosen, data=data)
    found = [report.quality.server for report in result.history if report.quality is not None]
    for tensors in [result.state.full, *result.state.algorithm_state.values(), result.local_state]:
        for tensor in tensors.values():
            assert float(tensor.abs().max()) < LARGEST
    smooth = torch.tensor(found).unfold(0, 4, 1).mean(1)  # 40 users, drawn devices: one evaluation is noise
    best = smooth.min() if chosen.smaller_is_better else smooth.max()
    assert float((smooth[-1] - best).abs()) < (0.01 if name in EXACT else OVERFITS)


def history(*values: float) -> list[RoundReport]:
    return [RoundReport(number + 1, 0.0, 1, 0, 0, Quality(value, ())) for number, value in enumerate(values)]


def test_a_diverging_run_is_distinguished_from_a_noisy_one() -> None:
    ranks = read_settings({})
    assert diverged(history(0.1, 0.4, *[0.15] * DIVERGED_EVALUATIONS), ranks) is not None
    assert diverged(history(0.1, 0.4, *[0.15] * (DIVERGED_EVALUATIONS - 1)), ranks) is None
    assert diverged(history(0.1, 0.4, *[0.15] * (DIVERGED_EVALUATIONS - 1), 0.25, 0.15), ranks) is None
    assert diverged(history(0.001, 0.03, *[0.012] * DIVERGED_EVALUATIONS), ranks) is None  # half of little
    assert diverged(history(0.1, 0.4, *[float("nan")] * DIVERGED_EVALUATIONS), ranks) is not None
    rated = read_settings({"algorithm": {"kind": "ratings"}})
    assert diverged(history(1.0, 0.8, *[1.7] * DIVERGED_EVALUATIONS), rated) is not None
    assert diverged(history(1.0, 0.8, *[1.5] * DIVERGED_EVALUATIONS), rated) is None


def test_a_run_that_diverges_stops_with_its_best_model_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    apply = BayesianRatings.server_update

    def forgetting(self: BayesianRatings, plan: Plan, state: State, aggregate: Aggregate) -> State:
        after = apply(self, plan, state, aggregate)
        if state.round_number < 4:
            return after
        return replace(after, full=after.full | {ROWS: -torch.arange(len(after.full[ROWS])).flip(0).float()})

    monkeypatch.setattr(BayesianRatings, "server_update", forgetting)
    chosen = read_settings(
        {
            "algorithm": {"kind": "ratings"},
            "model": {"factors": 4},
            "fleet": {"clients_per_round": None},
            "run": {"rounds": 60, "evaluate_every": 1},
        }
    )
    rounds_reported = list[int]()
    result = simulate(chosen, lambda report, _: rounds_reported.append(report.round_number), data=rated(world()))
    found = [report.quality.server for report in result.history if report.quality is not None]
    best = min(found)
    assert len(rounds_reported) < 60
    assert result.quality == best
    assert result.state.round_number == found.index(best) + 1 <= 4
    assert "it diverges" in (stop_reason(result.history, chosen) or "")
