"""One update of every method attacked: what it reveals, against what is known of it."""

import pytest

from experiments import fedrec_audit as module
from experiments.combine import unpack_per_user
from experiments.fedrec_audit import AUC, FOUND, OTHERS, FedRecAuditSettings, audit_updates
from fairfold.errors import InvalidSettings
from tests.support.audit import clients


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "leave_newest_out", lambda _name: clients())


def attacked(method: str, **others: int) -> tuple[dict[str, float], dict[str, str]]:
    progress: list[None] = []
    given = FedRecAuditSettings(method, targets=8, **others)  # type: ignore[arg-type]
    facts, by_user = audit_updates(given, 0, lambda: progress.append(None))
    assert facts["targets"] >= 8 > 0
    assert progress
    return facts["measures"], by_user


@pytest.mark.parametrize(("method", "least"), [("fedmf", 0.98), ("colr", 0.98)])
def test_the_first_update_of_a_baseline_is_its_history(method: str, least: float) -> None:
    """Items of a user are moved one way and drawn ones the other, whatever the rank."""
    found, by_user = attacked(method, rounds=0)
    assert found[AUC] >= least
    assert 0.3 < found[OTHERS] < 0.7  # another's update reveals nothing of them
    assert unpack_per_user(by_user[AUC]).mean() == pytest.approx(found[AUC], abs=1e-3)


def test_a_sum_reveals_less_than_an_update() -> None:
    alone, summed = (attacked("fedmf", rounds=0, cohort=cohort)[0] for cohort in (1, 20))
    assert summed[AUC] < 0.8 < alone[AUC]
    assert summed[FOUND] < alone[FOUND]


def test_a_device_of_ours_reveals_all_in_its_first_update() -> None:
    assert attacked("ours", rounds=0)[0][AUC] > 0.9
    assert attacked("ours", rounds=1)[0][AUC] < 0.6  # nothing is new


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"one of .*fedmf"):
        FedRecAuditSettings("fedmff")
