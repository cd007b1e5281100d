"""The example with Optuna: trials that report every evaluation, and are stopped early where others did better."""

import pytest


@pytest.mark.filterwarnings("ignore")
def test_the_example_searches_and_stops_bad_trials() -> None:
    optuna = pytest.importorskip("optuna", reason="optuna is not installed: pip install optuna")
    from examples.with_optuna import Prune, search

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = search(trials=6, rounds=10)
    finished = [trial for trial in study.trials if trial.state.name == "COMPLETE"]
    assert len(finished) >= 3
    assert study.best_value == max(trial.value for trial in finished)
    assert all(list(trial.intermediate_values) == [5, 10] for trial in finished)
    assert all(list(trial.intermediate_values) == [5] for trial in study.trials if trial.state.name == "PRUNED")

    class Hopeless(optuna.Trial):  # type: ignore[misc, name-defined]
        def should_prune(self) -> bool:
            return True

    from fairfold.federation.evaluation import Quality, RoundReport

    callback = Prune(Hopeless(study, study.ask()._trial_id))
    callback.on_round(RoundReport(1, 0.1, 1, 1, 1, None))
    with pytest.raises(optuna.TrialPruned, match="after round 5"):
        callback.on_round(RoundReport(5, 0.1, 1, 1, 1, Quality(0.1, ())))
