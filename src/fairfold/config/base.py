"""The base class of all settings: frozen, validated before any work, and without keys that have no effect."""

from collections.abc import Mapping
from types import NoneType
from typing import Any, ClassVar, Self, get_args

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

NONE = "none"
"""How a TOML file writes None: ``clients_per_round = "none"`` takes all clients."""

INACTIVE = "inactive_key"
"""Type of the validation error for a key that has no effect beside the others."""


class FrozenSettings(BaseModel):
    """A table of settings: immutable, without unknown keys and without inactive ones.

    Attributes:
        ACTIVE_WHEN: Keys that have an effect only under some values of another key: that key, and those values.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)
    ACTIVE_WHEN: ClassVar[Mapping[str, tuple[str, tuple[Any, ...]]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _parse_none(cls, values: Any) -> Any:
        if not isinstance(values, Mapping):
            return values
        nullable = {key for key, field in cls.model_fields.items() if NoneType in get_args(field.annotation)}
        return {key: None if value == NONE and key in nullable else value for key, value in values.items()}

    @model_validator(mode="after")
    def _refuse_inactive_keys(self) -> Self:
        for key in type(self).model_fields:
            if key in self.model_fields_set and self.is_inactive(key):
                raise PydanticCustomError(INACTIVE, "inactive key{why}", {"key": key, "why": self.why_inactive(key)})
        return self

    def is_inactive(self, key: str) -> bool:
        """Whether a key has no effect beside the others."""
        if key not in self.ACTIVE_WHEN:
            return False
        other, values = self.ACTIVE_WHEN[key]
        return self.is_inactive(other) or getattr(self, other) not in values

    def why_inactive(self, key: str) -> str:
        """The end of the error message of an inactive key: the key that it depends on."""
        other, values = self.ACTIVE_WHEN[key]
        return f" with {other}={getattr(self, other)!r}: it needs {' or '.join(map(repr, values))}"

    def effective(self, *, changed: bool = False) -> dict[str, Any]:
        """Active keys with JSON-compatible values; with ``changed`` only those that differ from their defaults."""
        values = self.model_dump(mode="json", exclude_defaults=changed)
        return {key: value for key, value in values.items() if not self.is_inactive(key)}
