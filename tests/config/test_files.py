"""Settings to TOML and back, recipes, single changes and how they are merged."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.config import Settings, merge_tables, nested, read_settings
from fairfold.config.files import load_settings, read_toml, recipes, to_toml
from fairfold.errors import InvalidSettings
from tests.config.test_union import KINDS, beside


def through_a_file(chosen: Settings, path: Path) -> Settings:
    path.write_text(to_toml(chosen), encoding="utf-8")
    return load_settings(path, {})


@pytest.mark.parametrize(("table", "kind"), [(table, kind) for table, kinds in KINDS.items() for kind in kinds])
def test_every_kind_survives_a_file(table: str, kind: str, tmp_path: Path) -> None:
    chosen = read_settings(beside(table, kind))
    assert through_a_file(chosen, tmp_path / "settings.toml") == chosen


weightings = st.sampled_from(["data", "equal"]) | st.floats(0, 1)
maybe = st.none() | st.integers(1, 2**40)
GRADIENT = st.fixed_dictionaries(
    {"kind": st.just("gradient")},
    optional={
        "local_epochs": st.integers(1, 2**30),
        "local_lr": st.floats(1e-12, 1e12),
        "local_optimizer": st.sampled_from(["sgd", "adagrad", "adam"]),
        "weighting": weightings,
        "shuffle": st.booleans(),
        "num_negatives": st.integers(1, 9),
        "prox": st.floats(0, 10),
        "user_vectors": st.sampled_from(["private", "uploaded"]),
        "server_lr": st.floats(1e-9, 10),
        "server_optimizer": st.sampled_from(["sgd", "momentum", "adam", "yogi", "adagrad"]),
        "max_change": st.floats(1e-9, 1e9),
    },
)
SOLVED = st.fixed_dictionaries(
    {"kind": st.just("closed_form")}, optional={"ridge": st.floats(1e-9, 1e9), "weighting": weightings}
)
FLEET = st.fixed_dictionaries(
    {},
    optional={
        "capacities": st.sampled_from(["1x", "1x-...-64x", "0.25-3x", "500KB-2MB"]),
        "clients_per_round": maybe,
        "group_seed": st.none() | st.integers(0, 2**61),
        "replacement": st.booleans(),
        "faults": st.fixed_dictionaries({}, optional={"drop": st.floats(0, 0.5), "nan": st.floats(0, 0.5)}),
    },
)
RUN = st.fixed_dictionaries(
    {},
    optional={
        "seed": st.integers(0, 2**61),
        "rounds": st.integers(1, 2**30),
        "threshold": st.none() | st.floats(-1e6, 1e6),
        "patience": maybe,
        "device": st.sampled_from(["auto", "cpu", "cuda"]),
    },
)


@settings(max_examples=60)
@given(
    algorithm=GRADIENT | SOLVED, fleet=FLEET, run=RUN, name=st.text(min_size=1).filter(lambda name: "\r" not in name)
)
def test_any_values_survive_a_file(
    tmp_path_factory: pytest.TempPathFactory, algorithm: Any, fleet: Any, run: Any, name: str
) -> None:
    data = {} if name == "synthetic" else {"kind": "interactions", "name": name}
    chosen = read_settings({"data": data, "algorithm": algorithm, "fleet": fleet, "run": run})
    for key, value in algorithm.items():
        assert getattr(chosen.algorithm, key) == value
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:  # half a pair: no file can hold it
        return
    assert through_a_file(chosen, tmp_path_factory.getbasetemp() / "any.toml") == chosen
    assert tomllib.loads(to_toml(chosen))["algorithm"]["kind"] == algorithm["kind"]


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=5,
)


@settings(max_examples=100)
@given(st.dictionaries(st.sampled_from(["data", "model", "algorithm", "subspace", "fleet", "run", "factors", ""]), ANY))
def test_whatever_is_written_is_read_or_refused(values: dict[str, Any]) -> None:
    try:
        found = read_settings(values)
    except InvalidSettings:
        return
    assert read_settings(found.plain()) == found


def test_none_is_written_to_files_as_text(tmp_path: Path) -> None:
    chosen = read_settings({"fleet": {"clients_per_round": None}})
    assert 'clients_per_round = "none"' in to_toml(chosen)
    assert through_a_file(chosen, tmp_path / "none.toml").fleet.clients_per_round is None
    with pytest.raises(InvalidSettings, match=r"run\.rounds = 'none'"):
        read_settings({"run": {"rounds": "none"}})


@pytest.mark.parametrize("name", recipes())
def test_every_recipe_is_read_and_goes_on_from_its_file(name: str, tmp_path: Path) -> None:
    chosen = load_settings(None, {}, recipe=name)
    assert through_a_file(chosen, tmp_path / "recipe.toml") == chosen
    for data, special in read_toml(recipes()[name]).get("for", {}).items():
        of_data = load_settings(None, {"data.name": data}, recipe=name)
        for table, keys in special.items():
            assert all(of_data.plain()[table][key] == value for key, value in keys.items()), (data, table)


def test_a_recipe_or_a_file_but_not_both(tmp_path: Path) -> None:
    with pytest.raises(InvalidSettings, match="one of them"):
        load_settings(tmp_path / "file.toml", {}, recipe="default")
    with pytest.raises(InvalidSettings, match="recipe 'worst'"):
        load_settings(None, {}, recipe="worst")


def test_keys_without_tables_are_refused_with_their_tables(tmp_path: Path) -> None:
    path = tmp_path / "flat.toml"
    path.write_text("factors = 8\n")
    with pytest.raises(InvalidSettings, match=r"'factors' \(did you mean 'model\.factors'"):
        load_settings(path, {"run.rounds": 3})


@pytest.mark.parametrize(
    ("content", "words"),
    [(b"run = [", "a TOML file"), (b"\xff", "a TOML file"), (b"# " + b"x" * 2**20, "longer than")],
)
def test_files_that_are_none(content: bytes, words: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidSettings, match=words):
        load_settings(path, {})
    with pytest.raises(InvalidSettings, match="a readable TOML file"):
        load_settings(tmp_path / "absent.toml", {})


def test_changes_by_dots_are_tables() -> None:
    assert nested({"algorithm.ridge": 2, "fleet.faults.drop": 0.1}) == {
        "algorithm": {"ridge": 2}, "fleet": {"faults": {"drop": 0.1}}
    }  # fmt: skip
    with pytest.raises(InvalidSettings, match="'ridge' to be a table"):
        nested({"algorithm.ridge": 2, "algorithm.ridge.deeper": 3})


@pytest.mark.parametrize(
    ("base", "over", "expected"),
    [
        ({"run": {"seed": 1, "top": 5}}, {"run": {"seed": 2}}, {"run": {"seed": 2, "top": 5}}),
        ({"run": {"seed": 1}}, {"fleet": {"capacities": "1x"}}, {"run": {"seed": 1}, "fleet": {"capacities": "1x"}}),
        # Another kind: what was said of the first is not of it.
        ({"algorithm": {"kind": "gradient", "prox": 1}}, {"algorithm": {"kind": "ratings"}},
         {"algorithm": {"kind": "ratings"}}),
        ({"algorithm": {"kind": "gradient", "prox": 1}}, {"algorithm": {"kind": "gradient", "num_negatives": 2}},
         {"algorithm": {"kind": "gradient", "prox": 1, "num_negatives": 2}}),
        ({"subspace": {"method": "fair", "chunk": 4}}, {"subspace": {"method": "fedavg"}},
         {"subspace": {"method": "fedavg"}}),
        ({"data": {"kind": "interactions", "name": "a", "top_users": 3}}, {"data": {"name": "b"}},
         {"data": {"name": "b"}}),
        ({"data": {"name": "a", "top_users": 3}}, {"data": {"name": "a", "resplit": True}},
         {"data": {"name": "a", "top_users": 3, "resplit": True}}),
        ({"fleet": {"faults": {"drop": 0.1}}}, {"fleet": {"faults": {"nan": 0.2}}},
         {"fleet": {"faults": {"drop": 0.1, "nan": 0.2}}}),
        ({"algorithm": {"prox": 1}}, {"algorithm": "ratings"}, {"algorithm": "ratings"}),
    ],
)  # fmt: skip
def test_how_settings_are_merged(base: dict[str, Any], over: dict[str, Any], expected: dict[str, Any]) -> None:
    before = {table: dict(keys) for table, keys in base.items()}
    assert merge_tables(base, over) == expected
    assert base == before


def test_changes_of_settings() -> None:
    chosen = read_settings({"algorithm": {"kind": "gradient", "prox": 0.5}, "run": {"seed": 4}})
    assert chosen.with_changes({}) == chosen
    changed = chosen.with_changes({"algorithm.prox": 0.25, "fleet.capacities": "1x"})
    assert changed.plain()["algorithm"]["prox"] == 0.25
    assert changed.run.seed == 4
    other = chosen.with_changes({"algorithm.kind": "ratings"})
    assert other.algorithm == read_settings({"algorithm": "ratings"}).algorithm
