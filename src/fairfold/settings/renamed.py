"""Where the keys of flat settings, as they were before there were tables, stand now."""

from typing import Any

PLACES = {
    "data": "data.name",
    "top_users": "data.top_users",
    "resplit": "data.resplit",
    "world": "data",
    "images": "data",
    "seed": "run.seed",
    "model": "model.kind",
    "ratings": "model.ratings",
    "factors": "model.factors",
    "item_bias": "model.item_bias",
    "method": "subspace.method",
    "capacities": "fleet.capacities",
    "shares": "fleet.shares",
    "group_seed": "fleet.group_seed",
    "clients_per_round": "fleet.clients_per_round",
    "replacement": "fleet.replacement",
    "faults": "fleet.faults",
    "solver": "algorithm.kind",
} | {
    key: f"{table}.{key}"
    for table, keys in {
        "subspace": (
            "rank_rule mapping popularity tail_share support reference_factors chunk sign rehash start compress"
        ),
        "algorithm": (
            "user_vectors weighting objective local_epochs batch_size shuffle negatives regulariser local_optimiser "
            "local_step prox unobserved_weight ridge damping alike streamed aggregation server_optimiser server_step "
            "step_per largest_change"
        ),
        "run": "rounds backend device evaluate_every top patience threshold user_storage",
    }.items()
    for key in keys.split()
}
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
