"""Outcomes as tables take them: references of several splits as one, and a cell as a row per size of its devices."""

from dataclasses import replace
from statistics import mean

from fairfold.reproduce.records import Outcome

SEED = "seed"
"""Name of the fact that tells which seed an outcome is of."""


def of_seed(outcome: Outcome, seed: int) -> Outcome:
    """An outcome that says of which seed it is."""
    return replace(outcome, facts=outcome.facts | {SEED: seed})


def over_splits(found: list[Outcome], splits: bool) -> tuple[dict[str, float | str], dict[str, dict[int, str]]]:
    """What stands beside a table, and for each user: of several splits means, under what was chosen for each."""
    values: dict[str, list[float | str]] = {}
    names, each = dict[str, dict[str, None]](), dict[str, dict[int, str]]()
    for outcome in found:
        told: dict[str, float | str] = outcome.facts.get("references", {})
        for name in dict.fromkeys([*told, *outcome.by_user]):
            plain, _, chosen = name.partition(" (") if splits else (name, "", "")
            if not splits:  # of several data sets the last one's
                values.pop(plain, None), each.pop(plain, None)
            names.setdefault(plain, {})[chosen.removesuffix(")")] = None
            values.setdefault(plain, []).extend([told[name]] if name in told else [])
            if name in outcome.by_user:
                each.setdefault(plain, {})[outcome.facts[SEED]] = outcome.by_user[name]
    shown = {plain: plain + (f" ({' / '.join(filter(None, of))})" if any(of) else "") for plain, of in names.items()}
    means: dict[str, float | str] = {}
    for plain, known in values.items():
        numbers = [value for value in known if isinstance(value, float)]
        if known:
            missing = next((value for value in known if isinstance(value, str)), "")
            means[shown[plain]] = missing or mean(numbers)
    return means, {shown[plain]: texts for plain, texts in each.items()}


def per_size(row: str, column: str, known: list[Outcome]) -> list[tuple[str, str, list[Outcome]]]:
    """A place as one per size of its devices, each with what these hold and reach."""
    done = [outcome for outcome in known if outcome.state == "done"]
    devices = done[0].facts["devices"] if done else {}
    return [
        (f"{row}: {size}" if len(devices) > 1 else row, column, [_of_size(outcome, size) for outcome in done])
        for size in devices
    ] or [(row, column, known)]


def _of_size(outcome: Outcome, size: str) -> Outcome:
    told, by_user = outcome.facts["devices"][size], {"last": outcome.by_user.get(f"size {size}", "")}
    kept = {"facts": outcome.facts | {"devices": {size: told}}, "by_user": by_user if by_user["last"] else {}}
    return Outcome.of_value(
        told["everybody"], outcome.last_round or 0.0, seconds=outcome.seconds, data=outcome.data, **kept
    )
