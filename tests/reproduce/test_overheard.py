"""One answer of every method attacked: what it tells, against what is known of it."""

import pytest

from fairfold.errors import InvalidSettings
from fairfold.reproduce import overheard as module
from fairfold.reproduce.overheard import AUC, FOUND, OTHERS, OverheardSettings, overheard
from fairfold.reproduce.paired import unpacked
from tests.audit.worlds import people


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "newest_left_out", lambda _name: people())


def heard(method: str, **others: int) -> tuple[dict[str, float], dict[str, str]]:
    told: list[None] = []
    given = OverheardSettings(method, targets=8, **others)  # type: ignore[arg-type]
    facts, by_user = overheard(given, 0, lambda: told.append(None))
    assert facts["targets"] >= 8 > 0
    assert told
    return facts["measures"], by_user


@pytest.mark.parametrize(("method", "least"), [("fedmf", 0.98), ("colr", 0.98)])
def test_the_first_answer_of_a_rival_is_its_history(method: str, least: float) -> None:
    """Items of a user are moved one way and drawn ones the other, whatever the rank."""
    found, by_user = heard(method, rounds=0)
    assert found[AUC] >= least
    assert 0.3 < found[OTHERS] < 0.7  # another's answer says nothing of them
    assert unpacked(by_user[AUC]).mean() == pytest.approx(found[AUC], abs=1e-3)


def test_a_sum_tells_less_than_an_answer() -> None:
    alone, summed = (heard("fedmf", rounds=0, cohort=cohort)[0] for cohort in (1, 20))
    assert summed[AUC] < 0.8 < alone[AUC]
    assert summed[FOUND] < alone[FOUND]


def test_a_device_of_ours_says_all_in_its_first_answer() -> None:
    assert heard("ours", rounds=0)[0][AUC] > 0.9
    assert heard("ours", rounds=1)[0][AUC] < 0.6  # nothing is new


def test_an_unknown_method_is_refused() -> None:
    with pytest.raises(InvalidSettings, match=r"one of .*fedmf"):
        OverheardSettings("fedmff")
