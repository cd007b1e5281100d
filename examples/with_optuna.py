"""Settings searched by Optuna, with trials that do badly stopped early by a callback.

python examples/with_optuna.py [FILE] [--trials 10]    # needs `pip install optuna`; without a file, a synthetic world
"""

import argparse
from typing import Any

import optuna

import fairfold
from fairfold.federation.evaluation import Callback, RoundReport

WORLD = {"data.users": 100, "data.items": 300, "data.interactions_per_user": 30}


class Prune(Callback):
    """Reports every evaluation to a trial, and stops it where the others were better by then."""

    def __init__(self, trial: optuna.Trial) -> None:
        self.trial = trial

    def on_round(self, report: RoundReport) -> None:
        """Rounds that were evaluated count."""
        if report.quality is None:
            return
        self.trial.report(report.quality.server, report.round_number)
        if self.trial.should_prune():
            raise optuna.TrialPruned(f"after round {report.round_number}")


def search(interactions: Any = "synthetic", trials: int = 10, rounds: int = 20, seed: int = 0) -> optuna.Study:
    """FAIR by gradient steps: the step of a device and the factors that rank best.

    They are judged by what ``fit`` holds out. Hold out your own test beforehand where the figure is to be published.
    """

    def objective(trial: optuna.Trial) -> float:
        chosen = {
            "algorithm.local_lr": trial.suggest_float("local_lr", 1e-3, 0.3, log=True),
            "model.factors": trial.suggest_categorical("factors", [4, 8, 16]),
            "run.evaluate_every": 5,
            **(WORLD if interactions == "synthetic" else {}),
        }
        model = fairfold.fit(
            interactions, "1x-4x-16x", recipe="authors", rounds=rounds, seed=seed, settings=chosen, progress=False,
            callbacks=[Prune(trial)],
        )  # fmt: skip
        return model.result.quality

    chooser, pruner = optuna.samplers.TPESampler(seed=seed), optuna.pruners.MedianPruner(n_startup_trials=3)
    study = optuna.create_study(direction="maximize", sampler=chooser, pruner=pruner)
    study.optimize(objective, n_trials=trials)
    return study


if __name__ == "__main__":
    options = argparse.ArgumentParser()
    options.add_argument("file", nargs="?", default="synthetic")
    options.add_argument("--trials", type=int, default=10)
    given = options.parse_args()
    found = search(given.file, given.trials)
    states = [trial.state.name for trial in found.trials]
    print(
        f"best {found.best_value:.4f} with {found.best_params}; {states.count('PRUNED')} of {len(states)} stopped early"
    )
