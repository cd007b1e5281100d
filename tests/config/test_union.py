"""Tables are discriminated unions: which keys there are depends on the kind, and a key without effect is refused."""

from typing import Any, get_args

import pytest
from annotated_types import Le
from pydantic.fields import FieldInfo

from fairfold.config import Settings, read_settings
from fairfold.config.fleet import SUBTABLES
from fairfold.config.settings import KEY_SYNONYMS, TABLES, TAGS, algorithms, kinds_of, methods
from fairfold.config.tables import IMAGE_MODELS, MODELS, FrozenSettings, ModelSettings
from fairfold.errors import InvalidSettings

KINDS: dict[str, dict[str, type[FrozenSettings]]] = {
    table: dict.fromkeys(MODELS, ModelSettings) if table == "model" else kinds_of(table) for table in TABLES
}


def beside(table: str, kind: str) -> dict[str, dict[str, Any]]:
    """The fewest keys with which a kind of table is valid."""
    given: dict[str, dict[str, Any]] = {table: {TAGS[table]: kind} if table in TAGS else {}}
    if table == "data" and kind in ("interactions", "images"):
        given["data"]["name"] = "somewhere"
    if table == "data" and kind == "devices":
        given["data"]["items"] = 100
    if (table, kind) in [("data", "images"), ("algorithm", "images")] or (table == "model" and kind in IMAGE_MODELS):
        given.setdefault("model", {"kind": "mlp"})
        given.setdefault("data", {"name": "somewhere"})
    if table == "subspace":
        given["algorithm"] = {"kind": "gradient", "aggregation": "paper"}
    return given


def other_than_default(field: FieldInfo) -> Any:
    """A value that is not the default."""
    options = [value for value in get_args(field.annotation) if isinstance(value, str)]
    for part in get_args(field.annotation):
        options += [value for value in get_args(part) if isinstance(value, str)]
    if options:
        return next(value for value in options if value != field.default)
    if isinstance(field.default, bool) or field.annotation is bool or bool in get_args(field.annotation):
        return field.default is not True
    if isinstance(field.default, float) or float in get_args(field.annotation):
        return 0.25
    return min([13, *(int(str(bound.le)) for bound in field.metadata if isinstance(bound, Le))])


ALL = [(table, kind, key) for table, kinds in KINDS.items() for kind, of in kinds.items() for key in of.model_fields]
EVERY_KEY = {
    table: sorted({key for kind in kinds.values() for key in kind.model_fields}) for table, kinds in KINDS.items()
}
FOREIGN = [
    (table, kind, key)
    for table, kinds in KINDS.items()
    for kind, of in kinds.items()
    for key in EVERY_KEY[table]
    if key not in of.model_fields
]


@pytest.mark.parametrize("table", list(KINDS))
def test_every_kind_can_be_written(table: str) -> None:
    for kind in KINDS[table]:
        found = read_settings(beside(table, kind))
        if table in TAGS:
            assert getattr(getattr(found, table), TAGS[table]) == kind


@pytest.mark.parametrize(("table", "kind", "key"), FOREIGN)
def test_a_key_of_another_kind_is_unknown(table: str, kind: str, key: str) -> None:
    given = beside(table, kind)
    with pytest.raises(InvalidSettings, match=f"unknown key '{table}.{key}' with {table}.{TAGS[table]}='{kind}'"):
        read_settings(given | {table: given[table] | {key: 1}})


def test_there_are_keys_of_other_kinds() -> None:
    assert len(FOREIGN) > 100
    assert ("algorithm", "ratings", "local_lr") in FOREIGN
    assert ("subspace", "fedavg", "mapping") in FOREIGN


@pytest.mark.parametrize(("table", "kind", "key"), ALL)
def test_a_key_has_an_effect_or_is_refused(table: str, kind: str, key: str) -> None:
    """What is accepted is stored and written to files; what would be left out of a file is refused."""
    field = KINDS[table][kind].model_fields[key]
    if key == TAGS.get(table) or key in ("name", "shares", "capacities", "separator", *SUBTABLES):
        return  # tags and texts, tested by themselves
    given = beside(table, kind)
    value = other_than_default(field)
    given[table][key] = value
    refused, found = "", None
    try:
        found = read_settings(given)
    except InvalidSettings as error:
        refused = str(error)
    if found is None:
        words = (
            "unknown key",
            "inactive key",
            "is for",
            "has no",
            "have no",
            "needs",
            "averages models",
            "count rows",
            "asks for",
        )
        assert any(word in refused for word in words), refused
        return
    written = found.plain()[table]
    assert written[key] == value
    assert read_settings(found.plain()) == found
    without = {name: of for name, of in given[table].items() if name != key or field.is_required()}
    assert field.is_required() or read_settings(given | {table: without}) != found


@pytest.mark.parametrize(
    ("tables", "key"),
    [
        ({"algorithm": {"kind": "gradient", "unobserved_weight": 0.1}}, "algorithm.unobserved_weight"),
        ({"algorithm": {"kind": "gradient", "aggregation": "paper", "server_lr": 0.1}}, "algorithm.server_lr"),
        ({"algorithm": {"kind": "gradient", "aggregation": "paper", "step_per": "client"}}, "algorithm.step_per"),
        ({"algorithm": "gradient", "model": "neumf-mlp", "run": {"top": 5}}, "run.top"),
        ({"algorithm": {"kind": "gradient", "num_negatives": 3}, "model": "neumf-mlp"}, "algorithm.num_negatives"),
        ({"algorithm": {"kind": "central", "l2": 0.1}, "model": "neumf-mlp"}, "algorithm.l2"),
        ({"algorithm": "ratings", "run": {"top": 5}}, "run.top"),
        ({"model": {"kind": "mlp"}, "data": {"name": "mnist"}, "run": {"top": 5}}, "run.top"),
        ({"model": {"kind": "mlp", "factors": 8}, "data": {"name": "mnist"}}, "model.factors"),
        ({"model": {"kind": "neumf", "item_bias": True}}, "model.item_bias"),
        ({"model": {"kind": "mf", "ratings": True}}, "model.ratings"),
        ({"algorithm": "gradient", "subspace": {"mapping": "element", "chunk": 4}}, "subspace.chunk"),
        ({"algorithm": "gradient", "subspace": {"mapping": "chunk", "tail_share": 0.1}}, "subspace.tail_share"),
        ({"algorithm": "gradient", "subspace": {"mapping": "chunk", "support": 3}}, "subspace.support"),
        ({"algorithm": "gradient", "subspace": {"mapping": "chunk", "popularity": "counts"}}, "subspace.popularity"),
        ({"algorithm": "gradient", "subspace": {"popularity": "none", "tail_share": 0.1}}, "subspace.tail_share"),
        ({"algorithm": "gradient", "subspace": {"popularity": "none", "chunk": 4}}, "subspace.chunk"),
        ({"algorithm": "gradient", "subspace": {"start": "subspace"}}, "subspace.start"),
        ({"algorithm": "ratings", "subspace": {"sign": True}}, "subspace.sign"),
        ({"algorithm": "ratings", "subspace": {"chunk": 3}}, "subspace.chunk"),
        ({"algorithm": "ratings", "subspace": {"rehash": True}}, "subspace.rehash"),
        ({"model": "mlp", "data": {"name": "mnist", "split": "writer", "clients": 3}}, "data.clients"),
        ({"model": "mlp", "data": {"name": "mnist"}, "subspace": {"popularity": "counts"}}, "subspace.popularity"),
        ({"model": "mlp", "data": {"name": "mnist"}, "subspace": {"support": 3}}, "subspace.support"),
    ],
)
def test_keys_without_effect_beside_others_are_inactive(tables: dict[str, Any], key: str) -> None:
    with pytest.raises(InvalidSettings, match=f"inactive key '{key}'"):
        read_settings(tables)


@pytest.mark.parametrize(
    ("tables", "words"),
    [
        ({"algorithm": "gradient", "subspace": {"mapping": "element", "chunk": 4}}, "subspace.mapping='element'"),
        ({"model": {"kind": "neumf", "item_bias": True}}, "model.kind='neumf'"),
        ({"algorithm": "ratings", "subspace": {"chunk": 3}}, "algorithm.kind='ratings', which decides it"),
        ({"algorithm": "ratings", "run": {"top": 5}}, "algorithm.kind='ratings', where the quality is MSE"),
        ({"fleet": {"latency": {"log_std": 1.0}}}, "it needs fleet.latency.median_seconds"),
        ({"fleet": {"asynchronous": {"max_staleness": 1}}}, "it needs fleet.asynchronous.buffer_size or"),
    ],
)
def test_the_error_names_the_key_on_which_an_inactive_one_depends(tables: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        read_settings(tables)


def test_what_an_algorithm_brings_along_is_known_before_keys_are_looked_at() -> None:
    images = read_settings({"model": "mlp", "data": {"name": "mnist"}, "subspace": {"start": "subspace"}})
    assert images.plain()["subspace"]["compress"] == "all"
    hashed = read_settings({"algorithm": "closed_form", "subspace": {"mapping": "chunk"}})
    assert "support" not in hashed.plain()["subspace"]


LOCATIONS = {
    key: f"{table}.{key}" for table in TABLES for kind in kinds_of(table).values() for key in kind.model_fields
}


@pytest.mark.parametrize("key", sorted(LOCATIONS.keys() - TABLES))
def test_a_key_without_its_table_is_refused_with_its_table(key: str) -> None:
    with pytest.raises(InvalidSettings, match=rf"unknown key '{key}' \(did you mean '{LOCATIONS[key]}'"):
        read_settings({key: 3})


def test_synonyms_stand_for_keys_that_exist() -> None:
    for location in KEY_SYNONYMS.values():
        table, _, key = location.partition(".")
        assert any(key in kind.model_fields for kind in kinds_of(table).values()), location


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"method": "fair"}, "did you mean 'subspace.method'"),
        ({"algoritm": {}}, "did you mean 'algorithm'"),
        ({"algorithm": {"kind": "rating"}}, "did you mean 'ratings'"),
        ({"algorithm": {"rigde": 1}}, "did you mean 'ridge'"),
        ({"algorithm": {"kind": "gradient", "tune": False}}, "it is one of algorithm.kind='co_occurrence'"),
        ({"algorithm": {"ridge": "much"}}, "algorithm.ridge = 'much'"),
        ({"algorithm": 3}, "a table of keys"),
        ({"run": []}, "run = .*: a table of keys"),
        ({"fleet": {"faults": {"drop": 0.7, "nan": 0.7}}}, "add up to 1.4"),
        ({"fleet": {"capacities": "huge"}}, "fleet.capacities"),
        ({"fleet": {"faults": {"dorp": 0.1}}}, "unknown key 'fleet.faults.dorp'"),
        ({"algorithm": {"kind": "images"}}, "use one for recommenders"),
        ({"model": {"kind": "lenet"}}, "name images, e.g. --data mnist"),
        ({"algorithm": "gradient", "subspace": {"compress": "model"}}, "is for models of images"),
        ({"algorithm": {"ridge": float("nan")}}, "finite number"),
    ],
)
def test_errors_name_the_key_and_what_to_do(values: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidSettings, match=words):
        read_settings(values)


def test_a_class_or_an_object_stands_for_its_name() -> None:
    kind: Any = algorithms()["gradient"]
    assert Settings(algorithm=kind) == Settings(algorithm="gradient") == Settings(algorithm={"kind": "gradient"})
    assert Settings(algorithm=kind()) == Settings(algorithm="gradient")
    assert Settings(subspace=methods()["fedavg"], algorithm="gradient").subspace.method == "fedavg"


def test_another_split_is_another_seed_and_the_default_one_is_left_out() -> None:
    usual, other = (read_settings({"data": {"name": "ml-100k"} | of}).data for of in ({}, {"split_seed": 3}))
    assert "split_seed" not in usual.effective()
    assert "seed" not in usual.options  # type: ignore[union-attr]
    assert other.options["seed"] == 3  # type: ignore[union-attr]
