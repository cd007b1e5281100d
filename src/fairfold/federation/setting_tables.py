"""The tables within the settings, ``[world]``, ``[images]`` and ``[faults]``, and the base of all settings."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class Frozen(BaseModel):
    """Base of all settings: no change after construction, no unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class WorldSettings(Frozen):
    """The synthetic world: planted tastes over a catalogue whose popularity follows a power law."""

    users: int = Field(600, ge=2)
    items: int = Field(4_000, ge=10)
    interactions_per_user: int = Field(100, ge=2)
    taste_strength: float = Field(2.0, ge=0)


class ImageSettings(Frozen):
    """How the training images are divided among devices, and how a network sees them.

    Attributes:
        split: ``"dirichlet"``: every label's images in shares drawn from a Dirichlet distribution; ``"writer"``: a
            device a writer, where the data names them.
        devices: Number of devices (Dirichlet); one that is left without an image does not exist.
        concentration: Parameter of the distribution. Small values leave a device few labels.
        seed: Of the shares; None takes the run's.
        mean: Subtracted from every pixel, which is a number from 0 to 1. A constant that everybody knows, as no device
            can work out the mean of all.
        deviation: What the result is divided by.
    """

    split: Literal["dirichlet", "writer"] = "dirichlet"
    devices: int = Field(30, ge=1)
    concentration: float = Field(0.5, gt=0)
    seed: int | None = Field(None, ge=0, lt=2**62)
    mean: float = Field(0.0, ge=0, le=1)
    deviation: float = Field(1.0, gt=0)


class FaultSettings(Frozen):
    """Shares of a round's clients that fail, each in one way.

    Attributes:
        drop: Never answer.
        late: Answer when the round is over.
        nan: Send NaN.
        infinite: Send infinity.
        wrong_size: Send a vector of another length.
        out_of_range: Send values far from what they were sent.
    """

    drop: float = Field(0.0, ge=0, le=1)
    late: float = Field(0.0, ge=0, le=1)
    nan: float = Field(0.0, ge=0, le=1)
    infinite: float = Field(0.0, ge=0, le=1)
    wrong_size: float = Field(0.0, ge=0, le=1)
    out_of_range: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _at_most_everybody(self) -> Self:
        total = sum(self.model_dump().values())
        if total > 1 + 1e-9:
            raise ValueError(f"shares of faults that add up to {total:.3g}: at most 1")
        return self
