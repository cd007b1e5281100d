"""Every algorithm by every runner, at every width of capacities, with and without failing clients: the same numbers.

The oracle is one client after the other. A cell that a method cannot serve is refused before any work, by every runner.
Another runner joins by an entry in ``RUNNERS``.
"""

from collections import Counter
from functools import cache
from typing import Any

import pytest

from fairfold.errors import InvalidCapacity
from fairfold.federation.algorithm import mean_change
from fairfold.federation.federation import Federation
from fairfold.federation.round import sequential
from tests.support.federations import tiny_data, tiny_settings
from tests.support.parity import RUNNERS, SEQUENTIAL, Data, Outcome, compare, precision
from tests.support.pictures import SMALL, pictures
from tests.support.settings import make_settings

SCHEMES = {"1x": "1x", "1x-16x": "1x-16x", "1x-…-64x": "1x-2x-4x-8x-16x-32x-64x"}
FAULTS: dict[str, dict[str, float]] = {
    "no faults": {},
    "faults": {"drop": 0.1, "late": 0.1, "nan": 0.1, "infinite": 0.1, "wrong_size": 0.1, "out_of_range": 0.1},
}
USERS, ITEMS = 16, 130

GRADIENT: dict[str, Any] = {"factors": 4, "batch_size": 16}
RANKED: dict[str, Any] = {"algorithm": "closed_form", "aggregation": "delta", "sign": False, "chunk": 3}
RATINGS: dict[str, Any] = {"algorithm": "ratings", "reference_factors": 3, "tail_share": 0.5}
IMAGES: dict[str, Any] = SMALL | {"data": {"name": "pictures", "clients": 8}, "clients_per_round": 4, "local_epochs": 1}
IMAGES |= {"local_optimizer": "sgd", "local_lr": 0.1}  # Adam's first steps are as long for everybody
CASES: dict[str, dict[str, Any]] = {
    "gradient fair": GRADIENT,
    "gradient fair_hom": GRADIENT | {"method": "fair_hom"},
    "gradient full_trn": GRADIENT | {"method": "full_trn"},
    "gradient fedavg": GRADIENT | {"method": "fedavg"},
    "gradient fedhm": GRADIENT | {"method": "fedhm", "factors": 32},
    "gradient heterofl": GRADIENT | {"method": "heterofl", "factors": 16},
    "gradient inconsistent": GRADIENT | {"method": "inconsistent", "mapping": "element"},
    "gradient neumf": GRADIENT | {"model": "neumf", "local_optimizer": "adam", "local_lr": 0.02, "compress": "all"},
    "gradient rehash": GRADIENT | {"rehash": True, "mapping": "element", "aggregation": "delta"},
    "gradient uploaded": GRADIENT | {"user_vectors": "uploaded"},
    "gradient prox": GRADIENT | {"prox": 0.1},
    "gradient ratings": GRADIENT | {"model": "neumf-mlp", "local_lr": 0.02},
    "gradient own model": GRADIENT | {"model": "tests.support.own_models:BiasedMF"},
    "closed_form": {"algorithm": "closed_form", "aggregation": "delta"},
    "closed_form newton": {
        "algorithm": "closed_form",
        "aggregation": "delta",
        "server_optimizer": "newton",
        "server_lr": 1.0,
    },
    "closed_form paper": {"algorithm": "closed_form", "mapping": "element"},
    "closed_form chunk": RANKED | {"mapping": "chunk"},
    "closed_form support": RANKED | {"support": 6, "tail_share": 0.5},
    "closed_form tail_share": RANKED | {"support": 0, "tail_share": 0.25, "weighting": 0.5},
    "closed_form reference_factors": RANKED | {"reference_factors": 6, "factors": 5, "chunk": 5, "weighting": "data"},
    "ratings tail_share": RATINGS | {"tail_share": 0.25},
    "ratings": RATINGS,
    "ratings streamed": RATINGS | {"streamed": True},
    "co_occurrence": {"algorithm": "co_occurrence", "method": "truncated"},
    "co_occurrence streamed": {
        "algorithm": "co_occurrence",
        "method": "truncated",
        "streamed": True,
        "reference_factors": 3,
    },
    "images fair": IMAGES,
    "images fedhm": IMAGES | {"method": "fedhm"},
    "images heterofl": IMAGES | {"method": "heterofl"},
    "images inconsistent": IMAGES | {"method": "inconsistent"},
    "central": {"algorithm": "central", "batch_size": 16},
}
CANNOT = {
    ("gradient fedhm", "1x-…-64x"),
    ("gradient heterofl", "1x-…-64x"),
    ("images fedhm", "1x-…-64x"),
}
"""What the methods cannot serve: fewer numbers than rank 1, a column or a unit takes."""
BITS = {"gradient own model", "central"}
"""Where no faster way exists, the backends are one, to the bit."""


def of_images(case: str) -> bool:
    return case.startswith("images")


def rounds_of(case: str) -> int:
    return 2 if case.startswith(("gradient", "images")) else 3  # sums that remember are to be reminded


def data_for(case: str) -> Data:
    return pictures(1, side=12) if of_images(case) else tiny_data(1, USERS, ITEMS, ratings="ratings" in case)


def settings_for(case: str, scheme: str, faults: str = "no faults", **changes: Any) -> Any:
    chosen = CASES[case] | {"capacities": SCHEMES[scheme], "faults": FAULTS[faults], "seed": 3} | changes
    return make_settings(**chosen) if of_images(case) else tiny_settings(**{"clients_per_round": 8} | chosen)


@cache
def expected(case: str, scheme: str, faults: str) -> Outcome:
    with precision():
        return SEQUENTIAL.run(settings_for(case, scheme, faults), data_for(case), rounds_of(case))


@cache
def matrix_federation(case: str, scheme: str) -> Federation:
    with precision():
        return Federation.of(settings_for(case, scheme), data_for(case))


def skip_unless_served(runner: str, case: str, scheme: str) -> None:
    if not RUNNERS[runner].serves(matrix_federation(case, scheme)):
        pytest.skip(f"not for {runner}")


@pytest.mark.parametrize("runner", list(RUNNERS))
@pytest.mark.parametrize("faults", list(FAULTS))
@pytest.mark.parametrize("scheme", list(SCHEMES))
@pytest.mark.parametrize("case", list(CASES))
def test_the_same_numbers(case: str, scheme: str, faults: str, runner: str) -> None:
    if (case, scheme) in CANNOT:
        with pytest.raises(InvalidCapacity):
            RUNNERS[runner].run(settings_for(case, scheme, faults), data_for(case), 1)
        return
    skip_unless_served(runner, case, scheme)
    wanted = expected(case, scheme, faults)
    assert bool(wanted.rejections) == bool(FAULTS[faults]) or case == "central"  # one client fails rarely
    with precision():
        found = RUNNERS[runner].run(settings_for(case, scheme, faults), data_for(case), rounds_of(case))
    compare(wanted, found)
    if case in BITS:
        assert all(found.state.full[name].equal(tensor) for name, tensor in wanted.state.full.items())


@pytest.mark.parametrize("runner", ["sequential", *RUNNERS])
@pytest.mark.parametrize("case", list(CASES))
def test_changes_beyond_what_is_allowed_are_refused_alike(case: str, runner: str) -> None:
    scheme = "1x-16x"
    with precision():
        chosen, data = settings_for(case, scheme, max_change=1e-9), data_for(case)
        start = Federation.of(chosen, data).initial()
        if runner == "sequential":
            found = SEQUENTIAL.run(chosen, data, 2)
        else:
            skip_unless_served(runner, case, scheme)
            found = RUNNERS[runner].run(chosen, data, 2)
    client_ids = 1 if case == "central" else chosen.fleet.clients_per_round
    assert found.rejections == Counter({"values out of range": 2 * client_ids})
    assert found.state.round_number == 2
    for name, tensor in start.full.items():
        assert found.state.full[name].equal(tensor)


@cache
def a_bound_between(case: str) -> float:
    """What half of a round's clients exceed, at a distance from anybody's largest change."""
    with precision():
        federation = Federation.of(settings_for(case, "1x-16x"), data_for(case))
        scheduled = federation.sampler.schedule(federation.initial(), federation.sampler.cohort(0).tolist())
        algorithm, sizes = federation.plan.algorithm, list[float]()
        for client_update in sequential(federation.clients, scheduled, {}):
            task, update = client_update.task, client_update.update
            changes = [mean_change(algorithm, task, name, of, update.weight) for name, of in update.sums.items()]
            sizes.append(max(float(change.to_dense().abs().max()) for change in changes))
    ordered = sorted(sizes)
    gap = max(range(1, len(ordered)), key=lambda place: ordered[place] / ordered[place - 1])
    assert ordered[gap] > 1.0001 * ordered[gap - 1]
    return float((ordered[gap] * ordered[gap - 1]) ** 0.5)


@pytest.mark.parametrize("runner", list(RUNNERS))
@pytest.mark.parametrize("case", [case for case in CASES if case != "central"])
def test_those_who_go_too_far_are_refused_and_nobody_else(case: str, runner: str) -> None:
    """Added up with others, one who goes too far would hide among the others."""
    skip_unless_served(runner, case, "1x-16x")
    chosen = settings_for(case, "1x-16x", max_change=a_bound_between(case))
    with precision():
        wanted = SEQUENTIAL.run(chosen, data_for(case), 1)
        assert 0 < wanted.rejections["values out of range"] < chosen.fleet.clients_per_round
        compare(wanted, RUNNERS[runner].run(chosen, data_for(case), 1))
