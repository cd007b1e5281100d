"""Settings of a federation: frozen, checked before any work, the same as the content of a TOML file."""

import difflib
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fairfold.errors import FairfoldError, InvalidSettings
from fairfold.subspace import parse_scheme


class Frozen(BaseModel):
    """Base of all settings: no change after construction, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class WorldSettings(Frozen):
    """The synthetic world: planted tastes over a catalogue whose popularity follows a power law."""

    users: int = Field(600, ge=2)
    items: int = Field(4_000, ge=10)
    interactions_per_user: int = Field(100, ge=2)
    taste_strength: float = Field(2.0, ge=0)


class Settings(Frozen):
    """Everything that decides a run.

    Attributes:
        data: What to train on: ``"synthetic"``.
        world: The synthetic world, where ``data`` is that.
        seed: Of everything random; the same settings and seed give the same numbers on the same hardware.
        capacities: Capacity scheme; users, ordered by id, are split into as many near-equal groups.
        size_rule: How capacities become sizes: ``"fitted"``, or the paper's powers of two, ``"paper"``.
        mapping: ``"element"``, ``"chunk"`` or ``"ranked"``.
        chunk: Z, how many neighbouring coordinates share one hash.
        sign: Random signs.
        rehash: A new hash every round, as in the paper's Algorithm 1, or one for the whole run.
        factors: d, numbers an item.
        rounds: T.
        clients_per_round: K, drawn without replacement.
        solver: What a device computes: ``"gradient"`` (E epochs of gradient steps on a pairwise loss, with the user's
            vector trained along) or ``"closed_form"`` (the user's vector solved exactly, one step on the whole
            catalogue).
        local_epochs: E, for gradient steps.
        batch_size: For gradient steps.
        local_step: Step size on the device.
        unobserved_weight: What an item the user did not touch counts, against 1 for one they did (closed form).
        ridge: Pull of the user's vector towards zero (closed form).
        weighting: Clients count by their number of interactions (``"data"``, the paper) or alike (``"equal"``).
        aggregation: ``"paper"``: θ ← Σ pᵢ Sᵢψᵢ′. ``"delta"``: θ ← θ + what the optimiser makes of Σ pᵢ Sᵢ(ψᵢ′ − ψᵢ).
        server_optimiser: For the delta rule: ``"sgd"`` or ``"adam"``.
        server_step: Its step size, η.
        evaluate_every: Rounds between evaluations; the last round is always evaluated.
        top: k of NDCG@k.
    """

    data: Literal["synthetic"] = "synthetic"
    world: WorldSettings = WorldSettings()
    seed: int = Field(0, ge=0, lt=2**62)
    capacities: str = "1x-4x-16x"
    size_rule: Literal["fitted", "paper"] = "fitted"
    mapping: Literal["element", "chunk", "ranked"] = "ranked"
    chunk: int = Field(1, ge=1)
    sign: bool = True
    rehash: bool = False
    factors: int = Field(8, ge=1)
    rounds: int = Field(60, ge=1)
    clients_per_round: int = Field(60, ge=1)
    solver: Literal["gradient", "closed_form"] = "closed_form"
    local_epochs: int = Field(1, ge=1)
    batch_size: int = Field(512, ge=1)
    local_step: float = Field(1.0, gt=0)
    unobserved_weight: float = Field(0.5, gt=0, le=1)
    ridge: float = Field(1.0, ge=0)
    weighting: Literal["data", "equal"] = "equal"
    aggregation: Literal["paper", "delta"] = "delta"
    server_optimiser: Literal["sgd", "adam"] = "adam"
    server_step: float = Field(0.03, gt=0)
    evaluate_every: int = Field(10, ge=1)
    top: int = Field(20, ge=1)

    @field_validator("capacities")
    @classmethod
    def _readable_scheme(cls, scheme: str) -> str:
        try:
            parse_scheme(scheme)
        except FairfoldError as error:
            raise ValueError(str(error)) from None
        return scheme

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        if self.clients_per_round > self.world.users:
            raise ValueError(f"clients_per_round={self.clients_per_round} of {self.world.users} users: ask for fewer")
        return self


def read_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from the content of a TOML file; errors name the key, and the nearest known one."""
    try:
        return Settings.model_validate(dict(values))
    except ValidationError as error:
        problems = [_explain(problem) for problem in error.errors()]
        raise InvalidSettings("; ".join(problems), "known keys with values in range", "Mend these.") from None


def _explain(problem: Mapping[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    name = ".".join(path) or "settings"
    if problem["type"] != "extra_forbidden":
        message = problem["msg"].removeprefix("Value error, ").rstrip(".")
        return f"{name} = {problem['input']!r}: {message}" if path else message
    model: type[Frozen] = WorldSettings if path[:-1] == ["world"] else Settings
    near = difflib.get_close_matches(path[-1], model.model_fields, n=1)
    return f"unknown key {name!r}" + (f" (did you mean {near[0]!r}?)" if near else "")
