"""Attacks find what is there to be found, and nothing where there is nothing: both can fail."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fairfold.data import Interactions
from fairfold.federation.updates import Update
from fairfold.privacy.audit import findings
from fairfold.privacy.audit.auditor import Auditor
from fairfold.privacy.audit.findings import Audit, Finding
from fairfold.privacy.audit.history import Figure, attack_sums, attack_updates, matched_auc, matched_items
from fairfold.privacy.audit.membership import (
    SumBackground,
    gaussian_advantage,
    infer_by_difference,
    infer_item,
    infer_membership,
    max_advantage,
)
from fairfold.privacy.audit.reconstruction import (
    HistoryTracks,
    UpdateReader,
    decode_histories,
    score_decoding,
    vector_error,
)
from fairfold.privacy.audit.replay import Observation, ReplayedClients
from tests.support.audit import EACH, audited_settings, clients, devices_of

EXACT = ["co_occurrence", "ratings", "closed_form"]


def source(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def nothing() -> None:
    """Nobody watches."""


def add_aggregate_noise(devices: ReplayedClients, sigma: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the server receive sums with Gaussian noise of σ times the length of a typical update."""
    clear, length = ReplayedClients.sums, float(torch.cat(list(next(devices.updates([0])).update.sums.values())).norm())
    draws = source(77)

    def noisy_sums(self: ReplayedClients, clients: list[int], *, rough: bool = False) -> list[Observation]:
        found = []
        for seen in clear(self, clients, rough=rough):
            sums = {
                name: of + sigma * length * torch.randn(of.shape, generator=draws, dtype=of.dtype)
                for name, of in seen.update.sums.items()
            }
            found.append(replace(seen, update=Update(sums, seen.update.weight)))
        return found

    monkeypatch.setattr(ReplayedClients, "sums", noisy_sums)


# -- one update --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", EXACT)
def test_one_update_of_a_full_device_is_its_history(kind: str) -> None:
    devices, _ = devices_of(audited_settings(kind))
    found = attack_updates(devices, UpdateReader(devices), list(range(10)), source(), nothing)
    assert all(target.auc == 1 and target.precision == 1 for target in found if target.inside)


@pytest.mark.parametrize("objective", ["bpr", "squared"])
def test_gradient_steps_give_most_of_a_history_away(objective: str) -> None:
    devices, _ = devices_of(audited_settings("gradient", **{"algorithm.objective": objective}))
    found = attack_updates(devices, UpdateReader(devices), list(range(20)), source(), nothing)
    assert Figure.of([target.auc for target in found if target.inside]).low > 0.8


@pytest.mark.parametrize("kind", ["closed_form", "ratings", "gradient"])
def test_vectors_that_are_not_sent_are_solved_for(kind: str) -> None:
    devices, _ = devices_of(audited_settings(kind))
    plan = devices.sampler.plan
    errors = [vector_error(plan, seen, secret) for seen, secret in devices.updates_and_secrets(list(range(10)))]
    assert all(error is not None and error < (0.05 if kind == "gradient" else 1e-4) for error in errors)


def test_another_vector_is_not_taken_for_the_users_own() -> None:
    devices, _ = devices_of(audited_settings("closed_form"))
    updates = list(devices.updates_and_secrets([0, 1]))
    error = vector_error(devices.sampler.plan, updates[0][0], updates[1][1])
    assert error is not None
    assert error > 0.05


def test_an_update_of_unknown_form_is_read_by_devices_of_one_item() -> None:
    devices, _ = devices_of(audited_settings("closed_form"))
    reader = UpdateReader(devices)
    (seen,) = devices.updates([3])
    unknown = Observation(seen.task, Update({"mine": seen.update.sums["item.weight"]}, 1.0))
    true = ReplayedClients.updates
    items = devices.clients.train.of(3)

    def renamed(self: ReplayedClients, clients: list[int]) -> Any:
        return (
            Observation(one.task, Update({"mine": one.update.sums["item.weight"]}, 1.0)) for one in true(self, clients)
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReplayedClients, "updates", renamed)
        scores = reader.scores(unknown)["column 0"]
    assert set(scores.topk(EACH).indices.tolist()) == set(items.tolist())


# -- sums --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["plain", "secure"])
def test_exact_sums_of_few_devices_are_read(level: str) -> None:
    devices, data = devices_of(audited_settings("co_occurrence", level))
    members = list(range(5))
    (seen,) = devices.sums(members)
    read = score_decoding(decode_histories(devices.sampler.plan, seen), {user: data.train.of(user) for user in members})
    assert read.wrong == 0
    assert Figure.of(list(read.shares.values())).value > 0.9


def test_nothing_is_read_from_sums_with_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, data = devices_of(audited_settings("co_occurrence", "secure"))
    add_aggregate_noise(devices, 0.5, monkeypatch)
    members = list(range(5))
    (seen,) = devices.sums(members)
    read = score_decoding(decode_histories(devices.sampler.plan, seen), {user: data.train.of(user) for user in members})
    assert sum(read.shares.values()) == 0


def test_histories_show_less_in_larger_sums_and_nothing_under_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, _ = devices_of(audited_settings("co_occurrence", "secure"))
    reader = UpdateReader(devices)
    few, many = (
        Figure.of([one.auc for one in attack_sums(devices, reader, size, 50, source(), nothing) if one.inside])
        for size in (5, 25)
    )
    assert few.low > 0.65
    assert many.high < few.low
    add_aggregate_noise(devices, 2.0, monkeypatch)
    hidden = Figure.of([target.auc for target in attack_sums(devices, reader, 25, 50, source(), nothing)])
    assert abs(hidden.value - 0.5) < 0.08
    assert hidden.low < 0.5 < hidden.high + 0.03


def test_who_knows_much_is_stopped_by_noise_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    devices, _ = devices_of(audited_settings("co_occurrence", "secure"))
    reader = UpdateReader(devices)

    def attacked() -> list[Figure]:
        item, _ = infer_item(devices, reader, 10, 40, source(), nothing)
        return [Figure.of(item), Figure.of(infer_membership(devices, 10, 40, source(), nothing))]

    assert all(found.value > 0.95 for found in attacked())
    assert set(infer_by_difference(devices, 10, 40, source(), nothing)) == {1.0}
    add_aggregate_noise(devices, 3.0, monkeypatch)
    assert all(found.low < 0.65 for found in attacked())


@pytest.mark.parametrize("sigma", [0.5, 1.0])
def test_the_strongest_attacker_has_the_advantage_that_theory_gives(
    sigma: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    devices, _ = devices_of(audited_settings("co_occurrence", "secure"))
    add_aggregate_noise(devices, sigma, monkeypatch)
    hits = [hit for seed in range(8) for hit in infer_by_difference(devices, 10, 50, source(seed), nothing)]
    found, expected = Figure.of(hits), gaussian_advantage(sigma)
    assert abs(found.value - expected) < 4 * (1 / len(hits)) ** 0.5
    assert found.value < 0.95  # noise that is missing would be noticed


def test_no_advantage_is_above_its_bound() -> None:
    assert max_advantage(0.0, 0.0) == 0
    assert max_advantage(1.0, 1e-5) == pytest.approx(0.46213, abs=1e-4)
    assert max_advantage(1e4, 0.0) == 1
    assert gaussian_advantage(1.0) == pytest.approx(0.38292, abs=1e-4)


def test_users_are_named_by_who_was_there_every_time() -> None:
    """Devices that say all of their pairs in every round, as where they begin anew: a sum names its members in time."""
    devices, data = devices_of(audited_settings("co_occurrence", "secure"))
    tracks = HistoryTracks()
    for number in range(12):
        cohort = devices.sampler.cohort(number).tolist()
        found = [one for seen in devices.sums(cohort) for one in decode_histories(devices.sampler.plan, seen)]
        read = score_decoding(found, {user: data.train.of(user) for user in cohort})
        tracks.add(found, cohort, read.users)
    right, wrong = tracks.named()
    assert right >= 5
    assert wrong <= right // 5


# -- figures -----------------------------------------------------------------------------------------------------------


def test_popularity_says_nothing_among_equals() -> None:
    train = clients(users=400).train
    found = []
    for user in range(100):
        pairs = matched_items(train, user, list(range(300, 320)), source(user))
        assert all(not set(mine.tolist()) & set(equals.tolist()) for mine, equals in pairs)
        found.append(matched_auc(train.counts_by_item.double(), pairs))
    assert abs(Figure.of(found).value - 0.5) < 0.02


def test_what_comes_from_neither_finds_both_equally() -> None:
    """Any order of items, the one by what people with short histories have among them, gives a half and no more."""
    draws, weights = source(8), 1 / torch.arange(3, 93).double()
    lengths = [10 if user % 2 else 40 for user in range(200)]
    towards = [weights * (1 + torch.arange(90) % 2 * (8 if length == 10 else 0)) for length in lengths]
    items = [torch.multinomial(of, many, generator=draws) for of, many in zip(towards, lengths, strict=True)]
    owner = torch.repeat_interleave(torch.arange(200), torch.tensor(lengths))
    train = Interactions.from_pairs(owner, torch.cat(items), 200, 90)
    short = torch.zeros(90).index_add_(0, train.items, (1 / train.counts_by_user.float())[train.users])
    everybody = list(range(200))
    found = [matched_auc(short, matched_items(train, user, everybody, source())) for user in everybody]
    assert sum(found) / len(found) == pytest.approx(0.5, abs=0.002)
    assert min(found) < 0.4 < 0.6 < max(found)  # of single users it says much
    for user, other in ((0, 1), (2, 3), (4, 7)):
        asked = [(user, [other]), (other, [user])]
        assert sum(matched_auc(short, matched_items(train, *ask, source())) for ask in asked) == pytest.approx(1)


def test_who_was_not_there_is_not_found() -> None:
    """One update, and sums: of the same users, the update of another and a sum without them say nothing."""
    devices, _ = devices_of(audited_settings("co_occurrence", "secure"))
    reader = UpdateReader(devices)
    updates = attack_updates(devices, reader, list(range(40)), source(), nothing)
    for targets in (updates, attack_sums(devices, reader, 5, 50, source(), nothing)):
        there, not_there = (Figure.of([one.auc for one in targets if one.inside == inside]) for inside in (True, False))
        assert there.low > 0.6
        assert abs(not_there.value - 0.5) < 0.05


def test_where_everybody_is_in_the_sum_some_are_left_out_to_compare_with() -> None:
    settings = audited_settings(
        "co_occurrence", "secure", **{"fleet.clients_per_round": None, "privacy.min_cohort": 60}
    )
    found = {one.attack: one for one in Auditor(settings, clients(), users=10, rounds=1).audit(compare=False).findings}
    assert found[findings.RANKED].users == found[findings.OTHERS].users == 10


def test_asking_does_not_change_what_devices_would_say() -> None:
    devices, _ = devices_of(audited_settings("co_occurrence", "secure"))
    first, again = (devices.sums(list(range(10)))[0].update.sums for _ in range(2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(bool(of.any()) for of in first.values())


def test_an_audit_distinguishes_the_levels() -> None:
    by_level: dict[str, Audit] = {}
    for level in ("plain", "secure"):
        settings = audited_settings("co_occurrence", level)
        by_level[level] = Auditor(settings, clients(), users=10, rounds=2).audit(compare=level == "plain")
    plain, secure = by_level.values()
    own = {(one.attack, one.group): one for one in plain.findings if one.own}
    assert own[findings.RANKED, "1x"].value == 1
    assert own[findings.NAMED, "all"].value == 1
    assert {one.seen for one in plain.findings if not one.own} == {"the sum of 5", "the sum of 20", "the sum of 60"}
    assert {one.seen for one in secure.findings} == {"the sum of 10"}
    assert plain.notes[0].startswith("plain: the server sees each device's update")
    assert secure.notes[0].startswith("secure: ")
    headings, rows = plain.table()
    assert headings[3:] == ["one update", "the sum of 5 *", "the sum of 20 *", "the sum of 60 *"]
    assert all(len(row) == len(headings) for row in rows)


def test_what_was_not_measured_is_no_figure() -> None:
    nobody = Finding.of("one update", findings.RANKED, Figure.of([]), 0.5)
    assert nobody.text() == "–"
    assert Audit("plain", [], [nobody], 0).plain()["findings"][0]["value"] is None


def test_noise_is_drawn_anew_for_every_sum() -> None:
    """A simulation's noise follows from its seed and round: who sums twice in a round must not find it twice."""
    devices, _ = devices_of(audited_settings("co_occurrence", "private"))
    first, again = (devices.sums(list(range(50)))[0].update.sums["sum"] for _ in range(2))
    exact = devices.exact_sums(list(range(50)))[0].update.sums["sum"]
    both = torch.stack([(first - exact).double(), (again - exact).double()])
    assert float(both.std(1).min()) > 0.1
    assert abs(float(torch.corrcoef(both)[0, 1])) < 0.3


def test_noise_that_is_missing_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = audited_settings("co_occurrence", "private", **{"privacy.epsilon": 2.0})
    auditor = Auditor(settings, clients(), users=40, rounds=1)
    hidden = auditor.audit(compare=False)
    assert len(hidden.notes) == 1
    own = {one.attack: one for one in hidden.findings}
    assert own[findings.DECODED].value == own[findings.NAMED].value == 0
    assert abs(own[findings.BEYOND].value - 0.5) < 0.08
    monkeypatch.setattr("fairfold.federation.noise.discrete_gaussian", lambda _sigma, many, _draw: np.zeros(many, int))
    bare = auditor.audit(compare=False)
    assert "noise is missing" in bare.notes[1]
    assert next(one for one in bare.findings if one.attack == findings.DIFFERENCE).value == 1


def test_a_sum_of_fewer_sizes_is_compared_with_the_beginning_of_others() -> None:
    """Where large devices are too few to be added up in one cohort and enough in another, sums differ in length."""
    draws = source()
    others = [torch.randn(20, generator=draws) for _ in range(8)]
    seen, update = torch.randn(12, generator=draws), torch.ones(12)
    longer, same = SumBackground(others), SumBackground([one[:12] for one in others])
    level = pytest.approx(same.distance(seen, update), rel=0.2)  # the spread is drawn to its mean, which differs
    assert longer.distance(seen, update) == level
    assert same.distance(torch.cat([seen, seen]), torch.cat([update, update])) == same.distance(seen, update)
