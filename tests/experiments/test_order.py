"""Cells that run side by side start in an order that keeps every kind of work going until the end."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from experiments.execute import start_order
from experiments.experiment import Cell, known_experiments, read_experiment
from experiments.kinds import KINDS

TABLES: dict[str, Any] = {"model": {"kind": "neumf"}}
IMAGES: dict[str, Any] = {"data": {"name": "mnist"}, "model": {"kind": "mlp"}}


def cell(number: int, seed: int, kind: str, **values: Any) -> Cell:
    return Cell("table", str(number), "column", kind, values, seed)


def federated(number: int, seed: int, base: dict[str, Any], rounds: int) -> Cell:
    return cell(number, seed, "federated", **base, run={"rounds": rounds})


def needs(one: Cell) -> str:
    return KINDS[one.kind].needs(one.values)


def work(one: Cell) -> float:
    return KINDS[one.kind].work(one.values)


@given(st.lists(st.tuples(st.sampled_from([0, 1]), st.sampled_from(["tables", "images", "convex"]), st.integers(1, 9)),
                max_size=20))  # fmt: skip
def test_every_cell_once_by_seed_and_long_ones_of_a_kind_first(drawn: list[tuple[int, str, int]]) -> None:
    cells = [
        cell(number, seed, "convex") if of == "convex" else
        federated(number, seed, TABLES if of == "tables" else IMAGES, rounds)
        for number, (seed, of, rounds) in enumerate(drawn)
    ]  # fmt: skip
    found = start_order(cells)
    assert sorted(found, key=lambda one: int(one.row)) == cells
    assert [one.seed for one in found] == sorted(one.seed for one in cells)
    for seed in (0, 1):
        for kind in {needs(one) for one in cells}:
            lengths = [work(one) for one in found if one.seed == seed and needs(one) == kind]
            assert lengths == sorted(lengths, reverse=True)


def test_kinds_of_work_take_turns_by_what_is_left_of_them() -> None:
    images = [federated(number, 0, IMAGES, 10) for number in range(8)]
    tables = [federated(8 + number, 0, TABLES, 10) for number in range(4)]
    alone = cell(12, 0, "federated", algorithm={"kind": "central"}, **TABLES)
    found = start_order([*tables, *images, alone])
    kinds = [needs(one) for one in found]
    assert len(set(kinds)) == 3
    assert found.index(alone) < 3  # the only one of its kind does not wait
    of_images = [place for place, kind in enumerate(k for k in kinds if k != needs(alone)) if kind == needs(images[0])]
    for done in range(1, 8):  # two in three at any time
        assert abs(of_images[done] - 1.5 * done) <= 2


def test_all_experiments_have_an_order() -> None:
    cells = [one for name in known_experiments() for one in read_experiment(name).cells]
    assert len(start_order(cells)) == len(cells)
