"""Bad input: a typed error with what was given, what was needed and what to do."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fairfold.errors import (
    FairfoldError,
    InvalidCapacity,
    InvalidDtype,
    InvalidSubspace,
    InvalidVector,
    NotNested,
)
from fairfold.subspace import Capacity, Subspace, Sums, assign_groups, nested_subspaces, parse_scheme

GOOD = Subspace(100, 20)


def vector_with(value: float, length: int = 100) -> torch.Tensor:
    vector = torch.zeros(length)
    vector[7] = value
    return vector


CASES: list[tuple[type[FairfoldError], str, Callable[[], Any]]] = [
    (InvalidSubspace, "size=0", lambda: Subspace(100, 0)),
    (InvalidSubspace, "size=-3", lambda: Subspace(100, -3)),
    (InvalidSubspace, "size=101", lambda: Subspace(100, 101)),
    (InvalidSubspace, "full_size=0", lambda: Subspace(0, 1)),
    (InvalidSubspace, "size=2.5", lambda: Subspace(100, 2.5)),  # type: ignore[arg-type]
    (InvalidSubspace, "size=True", lambda: Subspace(100, True)),
    (InvalidSubspace, "seed=-1", lambda: Subspace(100, 10, seed=-1)),
    (InvalidSubspace, "mapping='elment'", lambda: Subspace(100, 10, mapping="elment")),
    (InvalidSubspace, "chunk=0", lambda: Subspace(100, 10, mapping="chunk", chunk=0)),
    (InvalidSubspace, "chunk=3", lambda: Subspace(100, 10, mapping="chunk", chunk=3)),
    (InvalidSubspace, "chunk=2 with mapping='element'", lambda: Subspace(100, 10, chunk=2)),
    (InvalidSubspace, "head=5 with mapping='element'", lambda: Subspace(100, 10, head=5)),
    (InvalidSubspace, "head=10", lambda: Subspace(100, 10, mapping="ranked", head=10)),
    (InvalidSubspace, "head=-1", lambda: Subspace(100, 10, mapping="ranked", head=-1)),
    (InvalidSubspace, "head=3", lambda: Subspace(100, 10, mapping="ranked", head=3, chunk=2)),
    (InvalidSubspace, "hashed blocks", lambda: Subspace(2**34, 2**33)),
    (InvalidVector, "nan at position 7", lambda: GOOD.reduce(vector_with(math.nan))),
    (InvalidVector, "inf at position 7", lambda: GOOD.reduce(vector_with(math.inf))),
    (InvalidVector, "nan", lambda: GOOD.recover(vector_with(math.nan, 20))),
    (InvalidVector, "nan", lambda: GOOD.accumulate(vector_with(math.nan))),
    (InvalidVector, r"shape \(99,\)", lambda: GOOD.reduce(torch.zeros(99))),
    (InvalidVector, r"shape \(10, 10\)", lambda: GOOD.reduce(torch.zeros(10, 10))),
    (InvalidVector, r"shape \(100,\)", lambda: GOOD.recover(torch.zeros(100))),
    (InvalidVector, "out of shape", lambda: GOOD.recover(torch.zeros(20), out=torch.zeros(99))),
    (InvalidVector, r"range \[90, 101\)", lambda: GOOD.recover_range(torch.zeros(20), 90, 101)),
    (InvalidVector, r"range \[9, 3\)", lambda: GOOD.slots(9, 3)),
    (InvalidVector, "rows from 3 to 10", lambda: GOOD.recover_rows(torch.zeros(20), torch.tensor([3, 10]), 10)),
    (InvalidVector, "rows from -1", lambda: GOOD.recover_rows(torch.zeros(20), torch.tensor([-1]), 10)),
    (InvalidVector, "row_size=7", lambda: GOOD.recover_rows(torch.zeros(20), torch.tensor([0]), 7)),
    (InvalidVector, "rows of shape", lambda: GOOD.recover_rows(torch.zeros(20), torch.tensor([0.5]), 10)),
    (InvalidVector, "values of shape", lambda: GOOD.accumulate_rows(torch.zeros(3, 10), torch.tensor([1]))),
    (InvalidVector, "weight=-1", lambda: Sums().add(GOOD, torch.zeros(20), -1)),
    (InvalidVector, "no updates", lambda: Sums().recover()),
    (InvalidVector, "counts of shape", lambda: GOOD.fold(torch.zeros(20), torch.zeros(20), Subspace(100, 10))),
    (InvalidDtype, "torch.int64", lambda: GOOD.reduce(torch.zeros(100, dtype=torch.int64))),
    (InvalidDtype, "complex", lambda: GOOD.reduce(torch.zeros(100, dtype=torch.complex64))),
    (InvalidDtype, "list", lambda: GOOD.reduce([0.0] * 100)),  # type: ignore[arg-type]
    (NotNested, "20 hashed slots do not divide 30", lambda: GOOD.unfold(torch.zeros(20), Subspace(100, 30))),
    (NotNested, "differ in seed", lambda: GOOD.unfold(torch.zeros(20), Subspace(100, 40, seed=1))),
    (NotNested, "is larger than", lambda: GOOD.unfold(torch.zeros(20), Subspace(100, 10))),
    (InvalidCapacity, "capacity 'big'", lambda: Capacity.parse("big")),
    (InvalidCapacity, "capacity ''", lambda: Capacity.parse("")),
    (InvalidCapacity, "0.5x", lambda: Capacity.parse("0.5x")),
    (InvalidCapacity, "0x", lambda: Capacity.parse("0x")),
    (InvalidCapacity, "capacity 16", lambda: Capacity.parse(16)),
    (InvalidCapacity, "capacity 0", lambda: Capacity.parse(0)),
    (InvalidCapacity, "capacity -0.5", lambda: Capacity.parse(-0.5)),
    (InvalidCapacity, "capacity nan", lambda: Capacity.parse(math.nan)),
    (InvalidCapacity, "capacity None", lambda: Capacity.parse(None)),  # type: ignore[arg-type]
    (InvalidCapacity, "1/0", lambda: Capacity.parse("1/0")),
    (InvalidCapacity, "0MB", lambda: Capacity.parse("0MB")),
    (InvalidCapacity, "40 QB", lambda: Capacity.parse("40 QB")),
    (InvalidCapacity, "scheme ''", lambda: parse_scheme("")),
    (InvalidCapacity, "scheme '1x--4x'", lambda: parse_scheme("1x--4x")),
    (InvalidCapacity, "every capacity once", lambda: parse_scheme("1x-4x-4x")),
    (InvalidCapacity, "three dots", lambda: parse_scheme("...-4x")),
    (InvalidCapacity, "three dots", lambda: parse_scheme("1x-...-12x")),
    (InvalidCapacity, "can hold 0", lambda: nested_subspaces(100, ["128x"])),
    (InvalidCapacity, "can hold 2 coordinates", lambda: nested_subspaces(100, ["8B"], mapping="chunk", chunk=8)),
    (InvalidCapacity, "3 capacities for 2 devices", lambda: assign_groups(2, 3)),
]


@pytest.mark.parametrize(("kind", "given", "call"), CASES, ids=[case[1] + f" #{i}" for i, case in enumerate(CASES)])
def test_bad_input_is_refused_with_a_reason(kind: type[FairfoldError], given: str, call: Callable[[], Any]) -> None:
    with pytest.raises(kind, match=given) as caught:
        call()
    assert all((caught.value.given, caught.value.needed, caught.value.remedy))
    assert isinstance(caught.value, ValueError | TypeError)  # what callers who know nothing of fairfold would catch
