"""What to change in a run that ranks worse than popularity, which learns nothing."""

from typing import TYPE_CHECKING

from fairfold.federation.algorithm import Centralized

if TYPE_CHECKING:
    from fairfold.config import Settings

POPULARITY = "popularity"
"""Name of the baseline that ranks items by their number of users."""

LARGER_STEP, MORE_CLIENTS, MORE_ROUNDS = 10, 6, 2
"""Factors by which settings are advised to grow: together they lift NeuMF on MovieLens 100K above popularity."""


def below_popularity(settings: "Settings", quality: float, baseline: float | None) -> list[str]:
    """A sentence on a ranking that is worse than popularity, and what to change; none for any other run."""
    if baseline is None or settings.predicts_ratings or settings.model.reads_images or not quality < baseline:
        return []
    fact = f"Below popularity: {settings.metric} is {quality:.4f}, and {baseline:.4f} by the number of users alone."
    return [f"{fact} {_advice(settings)}"]


def _advice(settings: "Settings") -> str:
    algorithm, keys = settings.algorithm, settings.algorithm.effective()
    if algorithm.kind == "co_occurrence":
        return "Bring more users or interactions; with privacy.level='private', a larger privacy.epsilon."
    if keys.get("server_optimizer") == "newton":
        if settings.fleet.clients_per_round is not None:  # rounds until everybody has been asked many times
            longer = f"--rounds {LARGER_STEP * settings.run.rounds}"
            return f"Newton steps like all clients: try --set fleet.clients_per_round=none, or {longer}."
        weaker = f"algorithm.item_ridge={keys['item_ridge'] / LARGER_STEP:g}"
        return f"Try --set {weaker}, more rounds (--rounds {MORE_ROUNDS * settings.run.rounds}), or --recipe default."
    changes = [f"--rounds {MORE_ROUNDS * settings.run.rounds}"]
    clients = settings.fleet.clients_per_round
    if clients is not None and not isinstance(algorithm, Centralized):
        changes.append(f"--set fleet.clients_per_round={MORE_CLIENTS * clients}")
    if "local_lr" in keys and algorithm.kind != "closed_form":
        changes.append(f"--set algorithm.local_lr={LARGER_STEP * keys['local_lr']:g}")
    return f"Try --recipe fair; or stay, with more rounds, clients per round and a larger step: {' '.join(changes)}."
