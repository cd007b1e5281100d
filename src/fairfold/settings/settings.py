"""Settings of a run: a tagged union of tables, the same as the content of a TOML file.

``[data]``, ``[model]``, ``[algorithm]``, ``[subspace]``, ``[fleet]``, ``[run]``, ``[privacy]``. Which keys a table has
depends on its ``kind`` (of ``[subspace]``: ``method``, of ``[privacy]``: ``level``): a key that has no effect is an
unknown key.
"""

import difflib
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Any, Self

from pydantic import ConfigDict, SerializeAsAny, ValidationError, model_validator

from fairfold.algorithms import ALGORITHMS, Algorithm
from fairfold.errors import InvalidSettings, nearest
from fairfold.methods import METHODS, Leading, Method
from fairfold.protocol.plugins import name_of, registered
from fairfold.settings.base import GONE, Frozen
from fairfold.settings.pace import problem_of_time
from fairfold.settings.parts import DATA, SYNTHETIC, DataSettings, FleetSettings, ModelSettings, RunSettings
from fairfold.settings.privacy import PRIVACY, PlainPrivacy, PrivatePrivacy, SecurePrivacy

TABLES = ("data", "model", "algorithm", "subspace", "fleet", "run", "privacy")
TAGS = {"data": "kind", "model": "kind", "algorithm": "kind", "subspace": "method", "privacy": "level"}
"""The key of a table that says which others it has."""


class Settings(Frozen):
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
        super().__init__(**_resolved(tables))

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        problem = self._problem() or self.algorithm.problem_with(self)
        if problem is not None:
            raise ValueError(problem)
        return self

    def _problem(self) -> str | None:
        images, with_model = self.model.reads_images, f"with model.kind={self.model.kind!r}"
        if self.algorithm.images != images:
            wanted = "'images'" if images else "one for recommenders"
            return f"algorithm.kind={self.algorithm.kind!r} {with_model}: use {wanted}"
        if (self.data.kind == "images") != images:
            wanted = "name images, e.g. --data mnist" if images else "use model.kind='mlp' or 'lenet'"
            return f"data of kind {self.data.kind!r} {with_model}: {wanted}"
        if getattr(self.subspace, "compress", "") == "model" and not images:
            return "subspace.compress='model' is for models of images: use 'tables' or 'all'"
        if getattr(self.subspace, "start", "full") == "subspace" and not images:
            return "subspace.start='subspace' is for models of images: tables start small anyway"
        for table, key in (key.split(".") for key in self.without_effect()):
            if key in getattr(self, table).model_fields_set:
                why = f"where the quality is {self.metric}"
                if table == "privacy":
                    why = f"with {self.algorithm.kind}"
                elif isinstance(self.privacy, PrivatePrivacy):
                    why = f"with privacy.level={self.privacy.level!r}"
                return f"unknown key '{table}.{key}' {why}"
        counts_rows = any(getattr(self.subspace, key, None) for key in ("support", "reference_factors"))
        if counts_rows and self.model.kind not in ("mf", "neumf"):
            counted = "subspace.support and subspace.reference_factors count rows of model.factors numbers"
            return f"{counted}: use model.kind='mf' or 'neumf', not {self.model.kind!r}"
        if getattr(self.algorithm, "step_per", "round") == "client" and self.fleet.clients_per_round is None:
            return "algorithm.step_per='client' needs a number of fleet.clients_per_round"
        return problem_of_time(self) or self._problem_of_sums()

    def _problem_of_sums(self) -> str | None:
        """Why answers that are seen in sums alone do not go with the other tables, or None."""
        chosen, level = self.privacy, f"privacy.level={self.privacy.level!r}"
        if not isinstance(chosen, SecurePrivacy):
            return None
        if self.algorithm.pooled:
            return f"{level} where all data is in one place: there is nothing to hide in a sum"
        if not self.subspace.sums:
            return f"{level} with method={self.subspace.method!r}, whose answers are no sums: use another method"
        if isinstance(chosen, PrivatePrivacy) and not self.algorithm.releases:
            serving = ", ".join(repr(name) for name, kind in algorithms().items() if kind.releases)
            return f"{level} with algorithm.kind={self.algorithm.kind!r}: what can be private is {serving}"
        if self.fleet.replacement:
            return f"{level} with fleet.replacement: a device speaks once in a sum"
        drawn, written = self.fleet.clients_per_round, "clients_per_round" in self.fleet.model_fields_set
        if written and drawn is not None and drawn < chosen.smallest_cohort:  # a device is not told of the fleet
            asked = f"privacy.smallest_cohort={chosen.smallest_cohort} with fleet.clients_per_round={drawn}"
            return f"{asked}: ask more devices per round ('none' for all), or lower the minimum"
        return None

    @property
    def predicts_ratings(self) -> bool:
        """Whether what is learned predicts ratings, and does not rank."""
        return self.algorithm.predicts_ratings(self)

    @property
    def metric(self) -> str:
        """Name of the quality."""
        if self.model.reads_images:
            return "accuracy"
        return "MSE" if self.predicts_ratings else f"NDCG@{self.run.top}"

    @property
    def smaller_is_better(self) -> bool:
        """Whether the quality is an error."""
        return self.metric == "MSE"

    def plain(self, *, changed: bool = False) -> dict[str, dict[str, Any]]:
        """The keys that have an effect, by table; with ``changed`` what differs from the defaults, and the tags."""
        fixed, found = self.algorithm.fixed(self), dict[str, dict[str, Any]]()
        for table in TABLES:
            part: Frozen = getattr(self, table)
            values = part.effective(changed=changed)
            tag = TAGS.get(table)
            if tag is not None:
                values = {tag: getattr(part, tag)} | values
            found[table] = {key: value for key, value in values.items() if key not in fixed.get(table, {})}
        for key in self.without_effect():
            table, name = key.split(".")
            found[table].pop(name, None)
        return found

    def without_effect(self) -> list[str]:
        """Keys, as ``table.key``, that have no effect beside those of other tables."""
        ranking = [] if self.metric.startswith("NDCG") else ["run.top"]
        ranking += ["run.references"] if self.model.reads_images else []
        return [*ranking, *self.algorithm.without_effect(self)]

    def with_changes(self, changes: Mapping[str, Any]) -> "Settings":
        """Other settings, with some values by ``table.key``; what nobody wrote follows from them."""
        return read_settings(merged(self.written(), nested(changes)))

    def written(self) -> dict[str, dict[str, Any]]:
        """The keys that somebody wrote, by table, and the tags."""
        found = {}
        for table, keys in self.plain().items():
            given = getattr(self, table).model_fields_set | {TAGS.get(table)}
            found[table] = {key: value for key, value in keys.items() if key in given}
        return found


def algorithms() -> dict[str, type[Algorithm]]:
    """All that settings can name."""
    return {name_of(kind, "kind"): kind for kind in ALGORITHMS} | registered("algorithm")


def methods() -> dict[str, type[Method]]:
    """All that settings can name."""
    return {name_of(kind, "method"): kind for kind in METHODS} | registered("method")


def places() -> dict[str, str]:
    """Where a key stands that is given without its table; and what was called otherwise when there were none."""
    tables: dict[str, Iterable[type[Frozen]]] = {
        "data": DATA.values(), "model": [ModelSettings], "algorithm": algorithms().values(),
        "subspace": methods().values(), "fleet": [FleetSettings], "run": [RunSettings], "privacy": PRIVACY.values(),
    }  # fmt: skip
    found = {key: f"{table}.{key}" for table, kinds in tables.items() for kind in kinds for key in kind.model_fields}
    return found | {"solver": "algorithm.kind", "world": "data", "images": "data"}


ELSEWHERE = {
    "learning_rate": "algorithm.local_step", "lr": "algorithm.local_step", "epochs": "algorithm.local_epochs",
    "optimizer": "algorithm.local_optimiser", "dim": "model.factors",
    "embedding_dim": "model.factors", "latent_dim": "model.factors", "dataset": "data.name", "topk": "run.top",
    "regularization": "algorithm.ridge", "num_clients": "fleet.clients_per_round", "num_rounds": "run.rounds",
}  # fmt: skip
"""What other programs call some of the keys."""


def _suggested(key: str) -> str:
    """A hint at the table and key that one without a table may stand for."""
    known = ELSEWHERE | {name: place for name, place in places().items() if "." in place}
    near = difflib.get_close_matches(key, known, n=1, cutoff=0.75)
    return f" (did you mean {known[near[0]]!r}?)" if near else ""


def _resolved(tables: Mapping[str, Any]) -> dict[str, Any]:
    """Tables as the objects that their tags name, with the defaults that these bring for each other."""
    for key in tables:
        if key not in TABLES:
            place = places().get(key)
            hint = nearest(key, TABLES) or _suggested(key) or f": tables are {', '.join(TABLES)}"
            raise ValueError(f"unknown key {key!r}{hint if place is None else f': it is now {place}'}")
    given = {table: tables.get(table, {}) for table in TABLES}
    model = _table("model", ModelSettings, _named(given["model"]))
    kind = _usual(model, given["subspace"])
    algorithm: Algorithm = _tagged("algorithm", algorithms(), given["algorithm"], kind)
    defaults = algorithm.DEFAULTS
    model = model.filled(defaults.get("model", {}))
    of_method = dict(defaults.get("subspace", {}))
    first = of_method.pop("method", "fair")
    method: Method = _tagged("subspace", methods(), given["subspace"], first, of_method)
    synthetic = not isinstance(given["data"], Mapping) or given["data"].get("name", SYNTHETIC) == SYNTHETIC
    of_data = SYNTHETIC if synthetic else "images" if model.reads_images else "interactions"
    data = _tagged("data", DATA, given["data"], of_data)
    fleet = _table("fleet", FleetSettings, given["fleet"], defaults.get("fleet", {}))
    run = _table("run", RunSettings, given["run"], defaults.get("run", {}))
    privacy = _tagged("privacy", PRIVACY, given["privacy"], "plain")
    found = {
        "data": data, "model": model, "algorithm": algorithm, "subspace": method, "fleet": fleet, "run": run,
        "privacy": privacy,
    }  # fmt: skip
    preliminary = Settings.model_construct(**found)
    for table, fixed in algorithm.fixed(preliminary).items():
        part: Frozen = found[table]
        decided = {key: value for key, value in fixed.items() if key in type(part).model_fields}
        for key, value in decided.items():
            if key in part.model_fields_set and getattr(part, key) != value:
                raise ValueError(
                    f"unknown key '{table}.{key}' with algorithm.kind={algorithm.kind!r}, which decides it"
                )
        found[table] = part.model_copy(update=decided)
        found[table].__pydantic_fields_set__.difference_update(decided)  # not keys that somebody wrote
    return found


def _usual(model: ModelSettings, subspace: Any) -> str:
    """The algorithm that is taken where none is named: the best for a model and a method."""
    if model.reads_images:
        return "images"
    if model.kind != "mf" or model.item_bias:
        return "gradient"
    method = subspace.get("method", subspace) if isinstance(subspace, Mapping) else subspace
    return "correlations" if method in ({}, "leading") or isinstance(method, Leading) else "closed_form"


def _named(model: Any) -> Any:
    """A model by its name, where its class or its name alone is given."""
    if isinstance(model, str | type):
        model = {"kind": model}
    if isinstance(model, Mapping) and isinstance(model.get("kind"), type):
        kind = model["kind"]
        return dict(model) | {"kind": f"{kind.__module__}:{kind.__qualname__}"}
    return model


def _tagged(
    table: str, kinds: Mapping[str, Any], values: Any, default: str, defaults: Mapping[str, Any] = MappingProxyType({})
) -> Any:
    tag = TAGS[table]
    if isinstance(values, Frozen):
        return values.filled(defaults)
    if isinstance(values, type):  # a class in the place of its name
        return _table(table, values, {}, defaults)
    if isinstance(values, str):
        values = {tag: values}
    if not isinstance(values, Mapping):
        raise ValueError(f"{table} = {values!r}: a table of keys")
    values = dict(values)
    if table == "data" and values.get("name") == SYNTHETIC:
        del values["name"]
    name = values.get(tag, default)
    if not isinstance(name, str) or name not in kinds:
        needed = GONE.get(str(name)) or f"one of {', '.join(map(repr, kinds))}{nearest(str(name), kinds)}"
        raise ValueError(f"{table}.{tag} = {name!r}: {needed}")
    return _table(table, kinds[name], {tag: name} | values, defaults)


def _table(table: str, kind: Any, values: Any, defaults: Mapping[str, Any] = MappingProxyType({})) -> Any:
    if isinstance(values, kind):
        return values.filled(defaults)
    if not isinstance(values, Mapping):
        raise ValueError(f"{table} = {values!r}: a table of keys")
    try:
        return kind.read(values, defaults)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(table, kind, problem) for problem in error.errors())) from None


def _explain(table: str, kind: type[Frozen], problem: Mapping[str, Any]) -> str:
    path = [str(part) for part in problem["loc"]]
    name = ".".join([table, *path])
    if problem["type"] != "extra_forbidden":
        message = _message(problem).replace("unknown key '", f"unknown key '{table}.")
        return f"{name} = {problem['input']!r}: {message}"[:600] if path else message
    tag = TAGS.get(table)
    beside = "" if tag is None else f" with {table}.{tag}={kind.model_fields[tag].default!r}"
    hint = nearest(path[-1], kind.model_fields) or _of_others(table, path[-1]) or _suggested(path[-1])
    return f"unknown key {name!r}{beside}{hint}"


def _of_others(table: str, key: str) -> str:
    """Which other kinds of a table have a key."""
    kinds: Mapping[str, Any] = {"algorithm": algorithms(), "subspace": methods(), "data": DATA, "privacy": PRIVACY}
    found = [name for name, kind in kinds.get(table, {}).items() if key in kind.model_fields]
    return f" (it is one of {table}.{TAGS[table]}={' or '.join(map(repr, found))})" if found else ""


def _message(problem: Any) -> str:
    return str(problem["msg"]).removeprefix("Value error, ").rstrip(".")


def read_settings(values: Mapping[str, Any]) -> Settings:
    """Settings from the content of a TOML file; errors name the key, and the nearest known one or its new place."""
    try:
        return Settings(**values)
    except ValidationError as error:
        problems = "; ".join(map(_message, error.errors()))
    except (ValueError, RecursionError, OverflowError) as error:
        problems = str(error)[:2000]
    raise InvalidSettings(
        problems, "known keys with values in range", "Correct these; docs/settings.md lists all keys."
    )


def nested(changes: Mapping[str, Any]) -> dict[str, Any]:
    """``{"algorithm.ridge": 2}`` as tables."""
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


def merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Tables with others laid over them; one that is given another kind starts anew from that kind's defaults."""
    found = dict(base)
    for table, values in over.items():
        mine = found.get(table)
        if not isinstance(mine, Mapping) or not isinstance(values, Mapping):
            found[table] = values
            continue
        tag = TAGS.get(table)
        other = tag is not None and tag in values and values[tag] != mine.get(tag, values[tag] if not mine else None)
        if table == "data" and "name" in values and values["name"] != mine.get("name", values["name"]):
            other = True  # another data set: what was said of the first is not of it
        found[table] = dict(values) if other else merged(mine, values)
    return found
