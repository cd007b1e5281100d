"""Where the keys of flat settings, as they were before there were tables, stand now."""

from typing import Any

_SAME_NAME = {
    "data": "top_users resplit",
    "model": "ratings factors item_bias",
    "subspace": "rank_rule mapping popularity tail_share support reference_factors chunk sign rehash start compress",
    "algorithm": (
        "user_vectors weighting objective local_epochs batch_size shuffle negatives regulariser local_optimiser "
        "local_step prox unobserved_weight ridge alike streamed aggregation server_optimiser server_step "
        "step_per largest_change"
    ),
    "fleet": "capacities shares group_seed clients_per_round replacement faults",
    "run": "seed rounds backend device evaluate_every top patience threshold user_storage",
}
PLACES = {key: f"{table}.{key}" for table, keys in _SAME_NAME.items() for key in keys.split()} | {
    "data": "data.name", "world": "data", "images": "data", "model": "model.kind", "method": "subspace.method",
    "solver": "algorithm.kind",
}  # fmt: skip
"""The new place of every old key."""

GONE = {
    "initial_spread": "gone: a model's own spread is taken",
    "size_rule": "gone: sizes are fitted to the capacities",
    "broadcast": "gone: the server sends ψ",
}


def place_of(key: str, value: Any) -> str | None:
    """Where an old key stands now, in words; None for a key that there never was."""
    if (key, value) == ("model", "mf-ratings"):
        return "algorithm.kind='ratings' (with model.kind='mf')"
    if (key, value) == ("method", "central"):
        return "algorithm.kind='central'"
    return GONE.get(key) or PLACES.get(key)
