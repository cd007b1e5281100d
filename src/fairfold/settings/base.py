"""The base of all settings: frozen, checked before any work, and without keys that have no effect."""

from collections.abc import Mapping
from types import NoneType
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator

NONE = "none"
"""How a file says None, for which TOML has no word: ``clients_per_round = "none"`` takes everybody."""

GONE = {
    "least_squares": "it is gone (docs/decisions/least-squares.md): 'correlations' (recipe 'best') ranks better, "
    "'closed_form' trains FAIR's tables; what was trained with it has to be trained anew"
}
"""What settings may still name, and what to take instead."""


class Frozen(BaseModel):
    """No change after construction, no unknown keys, and no key that has no effect beside the others.

    Attributes:
        NEEDS: Keys that have an effect under some values of another key alone: the other key, and those values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    NEEDS: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _none_by_its_word(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        nullable = {key for key, field in cls.model_fields.items() if NoneType in get_args(field.annotation)}
        return {key: None if value == NONE and key in nullable else value for key, value in values.items()}

    @model_validator(mode="after")
    def _no_idle_keys(self) -> Self:
        for key in type(self).model_fields:
            if key in self.model_fields_set and self.idle(key):
                raise ValueError(f"unknown key {key!r}{self.why_idle(key)}")
        return self

    def idle(self, key: str) -> bool:
        """Whether a key has no effect beside the others."""
        if key not in self.NEEDS:
            return False
        other, values = self.NEEDS[key]
        return self.idle(other) or getattr(self, other) not in values

    def why_idle(self, key: str) -> str:
        """In words, why a key has no effect."""
        other, values = self.NEEDS[key]
        return f" with {other}={getattr(self, other)!r}: it needs {' or '.join(map(repr, values))}"

    def effective(self, *, changed: bool = False) -> dict[str, Any]:
        """The keys that have an effect, as plain values; with ``changed`` those that differ from their defaults."""
        found = self.model_dump(mode="json", exclude_defaults=changed)
        return {key: value for key, value in found.items() if not self.idle(key)}

    @classmethod
    def read(cls, values: Mapping[str, Any], defaults: Mapping[str, Any]) -> Self:
        """From keys that somebody wrote, among other defaults than those of the class: see :meth:`filled`."""
        known = {key: value for key, value in values.items() if key in cls.model_fields}
        new = {key: value for key, value in defaults.items() if key in cls.model_fields and key not in known}
        candidate = cls.model_construct(**known, **new)
        new = {key: value for key, value in new.items() if not candidate.idle(key)}
        found = cls.model_validate(dict(values) | new)
        found.__pydantic_fields_set__.difference_update(new)
        return found

    def filled(self, defaults: Mapping[str, Any]) -> Self:
        """With other defaults: for keys that were not given, exist here and have an effect."""
        return self.read({key: getattr(self, key) for key in self.model_fields_set}, defaults)
