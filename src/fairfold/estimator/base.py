"""What a model is before and after training: parameters in scikit-learn's form, and a trained run."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from fairfold.config import Settings
from fairfold.data import Dataset
from fairfold.errors import InvalidSettings, did_you_mean
from fairfold.estimator.inputs import has_integer_ids
from fairfold.federation.evaluation import GroupReport, Result
from fairfold.runs.loaded import LoadedRun


@dataclass(frozen=True)
class Fitted:
    """What training gives a model.

    Attributes:
        run: The trained run: plan, data, state of the server and local state.
        result: Quality by size, baselines, and a report per round.
        integer_ids: Whether the caller's ids of users and of items are integers; else they are text.
        stored_data: The data as it is written to disk: before clients count its items, where they do.
        seconds: How long the rounds took.
    """

    run: LoadedRun
    result: Result
    integer_ids: tuple[bool, bool]
    stored_data: Dataset
    seconds: float = 0.0


def finished_run(run: LoadedRun, stored: Mapping[str, Any]) -> Fitted:
    """What training gave, from a loaded run and the result that is stored in its folder."""
    data = run.interactions
    server = stored["server"]
    result = Result(
        run.settings,
        stored["metric"],
        run.progress.state,
        run.progress.local_state,
        run.progress.history,
        [GroupReport(**group) for group in stored["groups"]],
        server["quality"],
        server["baselines"],
        data.num_users,
        stored["rejections"],
        data.counted,
        stored["notes"],
        stored["privacy"],
        {name: (of[0], of[1]) for name, of in server["differences"].items()},
    )
    return Fitted(run, result, has_integer_ids(data), data, stored["seconds"])


class Parameters:
    """What a model is to be trained by; ``sklearn.base.clone`` makes another one of the same parameters."""

    PARAMETERS: ClassVar = ("capacities", "recipe", "method", "rounds", "seed", "settings")

    def __init__(
        self,
        capacities: str | None = None,
        *,
        recipe: str | None = None,
        method: str | None = None,
        rounds: int | None = None,
        seed: int | None = None,
        settings: Settings | Mapping[str, Any] | None = None,
    ) -> None:
        self.capacities = capacities
        self.recipe = recipe
        self.method = method
        self.rounds = rounds
        self.seed = seed
        self.settings = settings

    def get_params(self, deep: bool = True) -> dict[str, Any]:  # noqa: ARG002  # scikit-learn gives it
        """The parameters by name; ``deep`` changes nothing, since none of them is an estimator."""
        return {name: getattr(self, name) for name in self.PARAMETERS}

    def set_params(self, **parameters: Any) -> Self:
        """Change parameters of the next ``fit``, and return this model."""
        for name, value in parameters.items():
            if name not in self.PARAMETERS:
                given = f"parameter {name!r}{did_you_mean(name, self.PARAMETERS)}"
                remedy = "Give others by settings={'table.key': value}."
                raise InvalidSettings(given, f"one of {', '.join(self.PARAMETERS)}", remedy)
            setattr(self, name, value)
        return self

    def __repr__(self) -> str:
        given = ", ".join(f"{name}={value!r}" for name, value in self.get_params().items() if value is not None)
        return f"fairfold.Model({given})"
