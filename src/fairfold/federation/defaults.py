"""Models by name, and what some choices take where nothing else is said."""

import re
from typing import Any

OWN_MODEL = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*", re.ASCII)
"""How a model of one's own is named: ``package.module:Class``."""

IMAGE_MODELS = ("mlp", "lenet")
IMAGE_DEFAULTS: dict[str, Any] = {
    "compress": "all",
    "mapping": "chunk",
    "solver": "gradient",
    "clients_per_round": 10,
    "weighting": "data",
    "local_epochs": 20,
    "batch_size": 64,
    "local_optimiser": "adam",
    "local_step": 0.01,
    "aggregation": "paper",
    "rounds": 200,
}
"""What a model of images takes where nothing else is said: K, E, T and the rule of the paper's experiment on them."""

LEAST_SQUARES_DEFAULTS: dict[str, Any] = {
    "factors": 16,
    "sign": False,
    "tail_share": 0.125,
    "support": 10,
    "ridge": 1.0,
}
"""What ``solver="least_squares"`` takes where nothing else is said; ``chunk`` is ``factors``: rows are folded whole."""

SERVER_STEP_KEYS = ("server_optimiser", "server_step", "step_per")
"""Settings that mean nothing to ``solver="least_squares"``: refused there with other values than their defaults."""

RATING_MODELS = ("neumf-mlp", "mf-ratings")
MODELS = ("mf", "neumf", *RATING_MODELS, *IMAGE_MODELS)
SOLVED_MODELS = ("mf", "mf-ratings")
"""Those whose vectors can be solved for; all others are trained by gradient steps."""
RATING_DEFAULTS: dict[str, Any] = {
    "solver": "least_squares",
    "factors": 8,
    "reference_factors": 32,
    "tail_share": 0.125,
    "support": 0,
    "ridge": 80.0,
    "weighting": "data",
    "alike": True,
}
"""What ``model="mf-ratings"`` takes where nothing else is said, before what its solver does."""
