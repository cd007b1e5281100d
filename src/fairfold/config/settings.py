"""Settings of a run: tables whose keys depend on their kind, the same as the content of a TOML file.

``[data]``, ``[model]``, ``[algorithm]``, ``[subspace]``, ``[fleet]``, ``[run]``, ``[privacy]``. Which keys a table has
depends on its ``kind`` (of ``[subspace]``: ``method``, of ``[privacy]``: ``level``), the discriminator of a pydantic
union; plug-ins join the unions as they are registered. What one table decides for others (the algorithm for a model,
the defaults of an algorithm) is laid under the given keys before validation. A key that has no effect is refused.
"""

import difflib
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Annotated, Any, Self, Union

from pydantic import ConfigDict, Field, SerializeAsAny, TypeAdapter, ValidationError, model_validator

from fairfold.algorithms import ALGORITHMS, Algorithm
from fairfold.algorithms.closed_form import SUBSPACE_METHODS
from fairfold.config.fleet import PRIVACY, FleetSettings, PlainPrivacy
from fairfold.config.rules import incompatibility
from fairfold.config.tables import (
    DATA,
    IMAGE_MODELS,
    INACTIVE,
    SYNTHETIC,
    DataSettings,
    FrozenSettings,
    ModelSettings,
    RunSettings,
)
from fairfold.errors import InvalidSettings, did_you_mean
from fairfold.federation.algorithm import PredictsRatings, SettingsRules
from fairfold.federation.plugins import name_of, registered
from fairfold.methods import METHODS, Method, Truncated

TABLES = ("data", "model", "algorithm", "subspace", "fleet", "run", "privacy")
TAGS = {"data": "kind", "model": "kind", "algorithm": "kind", "subspace": "method", "privacy": "level"}
"""The key of a table that decides which others it has."""

UNIONS = ("data", "algorithm", "subspace", "privacy")
"""Tables of several classes, which differ in their tags."""

Kinds = dict[str, type[Any]]


def algorithms() -> dict[str, type[Algorithm]]:
    """Algorithms by name: built in and registered."""
    return {name_of(kind, "kind"): kind for kind in ALGORITHMS} | registered("algorithm")


def methods() -> dict[str, type[Method]]:
    """Methods by name: built in and registered."""
    return {name_of(kind, "method"): kind for kind in METHODS} | registered("method")


def kinds_of(table: str) -> Kinds:
    """The classes of a table by their tags; a table of one class has it under ``""``."""
    if table == "algorithm":
        return dict(algorithms())
    if table == "subspace":
        return dict(methods())
    single: Kinds = {"model": ModelSettings, "fleet": FleetSettings, "run": RunSettings}
    return {"": single[table]} if table in single else dict(DATA if table == "data" else PRIVACY)


class Settings(FrozenSettings):
    """Everything that decides a run: a field per table.

    Example:
        >>> settings = Settings(model="neumf", fleet={"capacities": "1x-4x"}, run={"rounds": 10})
        >>> settings.algorithm.kind, settings.with_changes({"run.rounds": 20}).run.rounds
        ('gradient', 20)
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)

    data: SerializeAsAny[DataSettings]
    model: ModelSettings
    algorithm: SerializeAsAny[Algorithm]
    subspace: SerializeAsAny[Method]
    fleet: FleetSettings
    run: RunSettings
    privacy: SerializeAsAny[PlainPrivacy]

    def __init__(self, **tables: Any) -> None:
        super().__init__(**_resolve(tables))

    @model_validator(mode="after")
    def _require_compatible(self) -> Self:
        self._fix_settings()
        problem = incompatibility(self) or self.algorithm.incompatibility(self)
        if problem is not None:
            raise ValueError(problem)
        return self

    def _fix_settings(self) -> None:
        """Set what the algorithm decides of other tables; refuse another value that was given."""
        for table, fixed in SettingsRules.of(self.algorithm).fixed_settings(self).items():
            part: FrozenSettings = getattr(self, table)
            decided = {key: value for key, value in fixed.items() if key in type(part).model_fields}
            for key, value in decided.items():
                if key in part.model_fields_set and getattr(part, key) != value:
                    kind = self.algorithm.kind
                    raise ValueError(f"inactive key '{table}.{key}' with algorithm.kind={kind!r}, which decides it")
            self.__dict__[table] = _without_given(part.model_copy(update=decided), decided)

    @property
    def predicts_ratings(self) -> bool:
        """Whether the model predicts ratings; else it ranks items, or reads images."""
        return PredictsRatings.of(self.algorithm).predicts_ratings(self)

    @property
    def metric(self) -> str:
        """Name of the measure of quality."""
        if self.model.reads_images:
            return "accuracy"
        return "MSE" if self.predicts_ratings else f"NDCG@{self.run.top}"

    @property
    def smaller_is_better(self) -> bool:
        """Whether the measure of quality is an error."""
        return self.metric == "MSE"

    def plain(self, *, changed: bool = False) -> dict[str, dict[str, Any]]:
        """Active keys by table, JSON-compatible; with ``changed`` what differs from the defaults, and the tags."""
        fixed = SettingsRules.of(self.algorithm).fixed_settings(self)
        tables: dict[str, dict[str, Any]] = {}
        for table in TABLES:
            part: FrozenSettings = getattr(self, table)
            values = part.effective(changed=changed)
            if table in TAGS:
                values = {TAGS[table]: getattr(part, TAGS[table])} | values
            tables[table] = {key: value for key, value in values.items() if key not in fixed.get(table, {})}
        for key in self.inactive_keys():
            table, name = key.split(".")
            tables[table].pop(name, None)
        return tables

    def inactive_keys(self) -> list[str]:
        """Keys, as ``table.key``, that have no effect beside those of other tables."""
        ranking = [] if self.metric.startswith("NDCG") else ["run.top"]
        ranking += ["run.baselines"] if self.model.reads_images else []
        return [*ranking, *SettingsRules.of(self.algorithm).inactive_keys(self)]

    def with_changes(self, changes: Mapping[str, Any]) -> "Settings":
        """A copy with other values by ``table.key``; what was not given explicitly follows from them."""
        return read_settings(merge_tables(self.given(), nested(changes)))

    def given(self) -> dict[str, dict[str, Any]]:
        """The keys that were given explicitly, by table, and the tags."""
        found = {}
        for table, keys in self.plain().items():
            given = getattr(self, table).model_fields_set | {TAGS.get(table)}
            found[table] = {key: value for key, value in keys.items() if key in given}
        return found


def _resolve(tables: Mapping[str, Any]) -> dict[str, FrozenSettings]:
    """Validated tables, of the classes that their tags name and with the defaults that follow from other tables."""
    for key in tables:
        if key not in TABLES:
            hint = _suggestion(key) or f": tables are {', '.join(TABLES)}"
            raise ValueError(f"unknown key {key!r}{hint}")
    kinds = {table: kinds_of(table) for table in TABLES}
    given = {table: _table_keys(table, tables.get(table, {}), kinds[table]) for table in TABLES}
    tag = _default_tag("algorithm", given["algorithm"], _default_algorithm(given["model"], given["subspace"]))
    algorithm = kinds["algorithm"].get(tag) if isinstance(tag, str) else None
    _default_tag("privacy", given["privacy"], "plain")
    implied = {table: dict(keys) for table, keys in (algorithm.defaults(given) if algorithm else {}).items()}
    method = implied.get("subspace", {}).pop("method", "fair")
    chosen = kinds["subspace"].get(str(_default_tag("subspace", given["subspace"], method)))
    for table, keys in (chosen.defaults(given) if chosen and not _reads_images(given["model"]) else {}).items():
        implied[table] = {**implied.get(table, {}), **keys}
    images = _reads_images(given["model"])
    named = isinstance(given["data"], dict) and "name" in given["data"]
    _default_tag("data", given["data"], SYNTHETIC if not named else "images" if images else "interactions")
    validated: dict[str, FrozenSettings] = {}
    problems: list[str] = []
    for table in TABLES:
        try:
            validated[table] = _validate_table(table, kinds[table], given[table], implied.get(table, {}))
        except ValidationError as error:
            problems += [_explain_problem(table, kinds[table], problem) for problem in error.errors()]
    if problems:
        raise ValueError("; ".join(problems))
    return validated


def _table_keys(table: str, given: Any, kinds: Kinds) -> Any:
    """The keys of a table that is given by its kind (a name or class) or as an object; its class joins ``kinds``."""
    tag = TAGS.get(table, "")
    if isinstance(given, FrozenSettings):
        explicit = {key: getattr(given, key) for key in given.model_fields_set}
        given = explicit | ({tag: type(given)} if table in UNIONS else {})
    if isinstance(given, str | type):
        given = {tag: given}
    if not isinstance(given, Mapping):
        return given
    keys = dict(given)
    kind = keys.get(tag)
    if isinstance(kind, type) and table == "model":
        keys[tag] = f"{kind.__module__}:{kind.__qualname__}"
    elif isinstance(kind, type):
        keys[tag] = name_of(kind, tag)
        kinds[keys[tag]] = kind
    if table == "data" and keys.get("name") == SYNTHETIC:
        del keys["name"]
    return keys


def _default_tag(table: str, keys: Any, default: str) -> Any:
    """The tag of a table's keys; the default is written into them where there is none."""
    return keys.setdefault(TAGS[table], default) if isinstance(keys, dict) else None


def _reads_images(model: Any) -> bool:
    return isinstance(model, dict) and model.get("kind") in IMAGE_MODELS


def _default_algorithm(model: Any, subspace: Any) -> str:
    """The algorithm that is taken where none is named: the best for a model and a method."""
    keys = model if isinstance(model, dict) else {}
    kind = keys.get("kind", "mf")
    if kind in IMAGE_MODELS:
        return "images"
    if kind != "mf" or keys.get("item_bias"):
        return "gradient"
    method = subspace.get("method") if isinstance(subspace, dict) else None
    if subspace == {} or method == name_of(Truncated, "method"):
        return "co_occurrence"
    return "closed_form" if method is None or method in SUBSPACE_METHODS else "gradient"


def _validate_table(table: str, kinds: Kinds, keys: Any, defaults: Mapping[str, Any]) -> FrozenSettings:
    """Validate a table by its class, over given defaults: those that the class has and that are active count."""
    tag = keys.get(TAGS[table]) if table in UNIONS and isinstance(keys, dict) else ""
    kind = kinds.get(tag) if isinstance(tag, str) else None
    new: dict[str, Any] = {}
    if kind is not None and isinstance(keys, dict) and defaults:
        known = {key: value for key, value in keys.items() if key in kind.model_fields}
        new = {key: value for key, value in defaults.items() if key in kind.model_fields and key not in known}
        candidate = kind.model_construct(**known, **new)
        new = {key: value for key, value in new.items() if not candidate.is_inactive(key)}
    adapter = _union_adapter(tuple(kinds.values()), TAGS[table] if table in UNIONS else None)
    part: FrozenSettings = _without_given(adapter.validate_python(keys | new if new else keys), new)
    return part


@lru_cache
def _union_adapter(kinds: tuple[type[Any], ...], tag: str | None) -> TypeAdapter[Any]:
    union: Any = kinds[0] if tag is None else Annotated[Union[kinds], Field(discriminator=tag)]  # noqa: UP007
    return TypeAdapter(union)


def _without_given(part: Any, keys: Mapping[str, Any]) -> Any:
    """The same table, whose ``keys`` count as defaults and not as given explicitly."""
    part.__pydantic_fields_set__.difference_update(keys)
    return part


KEY_SYNONYMS = {
    "learning_rate": "algorithm.local_lr", "lr": "algorithm.local_lr", "epochs": "algorithm.local_epochs",
    "optimizer": "algorithm.local_optimizer", "dim": "model.factors", "embedding_dim": "model.factors",
    "latent_dim": "model.factors", "dataset": "data.name", "topk": "run.top", "regularization": "algorithm.ridge",
    "num_clients": "fleet.clients_per_round", "num_rounds": "run.rounds",
}  # fmt: skip
"""What other programs call some of the keys."""


def _suggestion(key: str) -> str:
    """A hint at the table, or the table and key, that an unknown key may stand for."""
    known = {table: table for table in TABLES} | KEY_SYNONYMS
    for table in TABLES:
        known |= {key: f"{table}.{key}" for kind in kinds_of(table).values() for key in kind.model_fields}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    return f" (did you mean {known[near[0]]!r}?)" if near else ""


def _explain_problem(table: str, kinds: Kinds, problem: Mapping[str, Any]) -> str:
    """A validation error of a table in one sentence that names the key, and what it should be or depends on."""
    type_, context = problem["type"], problem.get("ctx", {})
    tag = TAGS[table] if table in UNIONS else ""
    path = [str(part) for part in problem["loc"]]
    if type_.startswith("union_tag"):
        given = problem["input"][tag]
        own = "" if table == "data" else ", or one of your own with --plugin FILE.py"
        wanted = f"one of {', '.join(map(repr, kinds))}{did_you_mean(str(given), kinds) or own}"
        return f"{table}.{tag} = {given!r}: {wanted}"
    kind = kinds[path.pop(0)] if tag and path else kinds.get("")
    name = ".".join([table, *path])
    if type_ == INACTIVE:
        why = re.sub(r"(?<= with )(?=\w+=)", f"{name}.", context["why"])
        return f"inactive key '{name}.{context['key']}'{why}"
    if type_ == "extra_forbidden":
        beside = f" with {table}.{tag}={problem['loc'][0]!r}" if tag else ""
        others = [repr(other) for other, one in kinds.items() if other and path[-1] in one.model_fields]
        elsewhere = f" (it is one of {table}.{tag}={' or '.join(others)})" if others else _suggestion(path[-1])
        hint = did_you_mean(path[-1], kind.model_fields if kind else ())
        return f"unknown key {name!r}{beside}{hint or elsewhere}"
    if type_ in ("model_type", "model_attributes_type", "dict_type"):
        return f"{name} = {problem['input']!r}: a table of keys"[:600]
    return f"{name} = {problem['input']!r}: {_error_text(problem)}"[:600] if path else _error_text(problem)


def _error_text(problem: Any) -> str:
    return str(problem["msg"]).removeprefix("Value error, ").rstrip(".")


def read_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from the content of a TOML file; errors name the key, and the nearest known one."""
    try:
        return Settings(**values)
    except ValidationError as error:
        problems = "; ".join(map(_error_text, error.errors()))
    except (ValueError, RecursionError, OverflowError) as error:
        problems = str(error)[:2000]
    raise InvalidSettings(
        problems, "known keys with values in range", "Correct these; docs/settings.md lists all keys."
    )


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nest keys with dots into tables: ``{"algorithm.ridge": 2}`` becomes ``{"algorithm": {"ridge": 2}}``."""
    found: dict[str, Any] = {}
    for key, value in changes.items():
        *tables, name = key.split(".")
        table = found
        for part in tables:
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                raise InvalidSettings(f"{key} = {value!r}", f"{part!r} to be a table", "Check the key.")
        table[name] = value
    return found


def merge_tables(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with others laid over them; one that is given another kind starts anew from that kind's defaults."""
    found = dict(base)
    for table, values in over.items():
        below = found.get(table)
        if not isinstance(below, Mapping) or not isinstance(values, Mapping):
            found[table] = values
            continue
        tag = TAGS.get(table)
        other = tag is not None and tag in values and values[tag] != below.get(tag, values[tag] if not below else None)
        if table == "data" and "name" in values and values["name"] != below.get("name", values["name"]):
            other = True  # another data set: keys of the first do not apply to it
        found[table] = dict(values) if other else merge_tables(below, values)
    return found
