"""Vectors of any length and type never let the C library of a device read or write beyond them."""

import random
from array import array
from typing import Any

import pytest

from fairfold.device import native
from fairfold.errors import InvalidMessage

WIDTH, ITEMS = 4, 6


def held(size: int) -> dict[str, Any]:
    return {"kind": "hashed", "shape": [ITEMS, WIDTH], "full_size": ITEMS * WIDTH, "size": size, "seed": 1,
            "mapping": "element", "chunk": 1, "head": 0, "sign": True}  # fmt: skip


HELD = {"p": held(8), "i": held(8), "w": held(8) | {"shape": [2 * WIDTH], "full_size": 2 * WIDTH, "size": 2 * WIDTH}}
FORMS = {
    "mf": native.NetworkForm(WIDTH, 0, (), False, ("p",), ("u",), (), "bpr", 0.0, "sgd", 0.1),
    "network": native.NetworkForm(0, WIDTH, (), True, ("i",), ("v",), ("w",), "softmax", 0.0, "sgd", 0.1),
}


@pytest.fixture(autouse=True)
def library() -> None:
    if native.library() is None:
        pytest.skip("the library was not built")


def floats(length: int) -> Any:
    return array("f", [0.5] * length)


def network(name: str, values: dict[str, Any], own: dict[str, Any]) -> native.LocalNetwork:
    return native.LocalNetwork(FORMS[name], HELD, values, own)


def good(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    if name == "mf":
        return {"p": floats(8)}, {"u": floats(WIDTH)}
    return {"i": floats(8), "w": floats(2 * WIDTH)}, {"v": floats(WIDTH)}


@pytest.mark.parametrize("name", list(FORMS))
@pytest.mark.parametrize("length", [0, 2, WIDTH - 1, WIDTH + 1, 64])
def test_a_user_s_own_vector_of_another_length_is_refused(name: str, length: int) -> None:
    """Two numbers where the model has 64 were read, and written, beyond their end."""
    values, own = good(name)
    network(name, values, own)
    with pytest.raises(InvalidMessage, match="no array of 4 numbers"):
        network(name, values, dict.fromkeys(own, floats(length)))
    with pytest.raises(InvalidMessage, match="no array of 4 numbers"):
        network(name, values, dict.fromkeys(own, array("d", [1.0] * WIDTH)))


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("wrong", [floats(2), floats(0), floats(9), array("d", [1.0] * 8), [1.0] * 8, b"12345678"])
def test_sums_of_vectors_of_other_lengths_or_types_are_refused(place: int, wrong: Any) -> None:
    given = [floats(8), floats(8), floats(8)]
    native.add_weighted(given[0], given[1], given[2], 2.0)
    if place or not isinstance(wrong, array) or wrong.typecode != "f":
        given[place] = wrong
        with pytest.raises(InvalidMessage, match="no array of"):
            native.add_weighted(given[0], given[1], given[2], 1.0)


def spoiled(numbers: Any, chance: random.Random) -> Any:
    kind = chance.randrange(4)
    if kind == 0:
        return array(numbers.typecode, numbers[: chance.randrange(len(numbers) + 1)])
    if kind == 1:
        return array(numbers.typecode, [*numbers, *numbers])
    if kind == 2:
        return array(chance.choice("fdqlhb"), [int(number) for number in numbers])
    return array("q", [chance.choice([-(2**62), -1, 0, 5, 6, 2**40, 2**62]) for _ in numbers])


def call(chance: random.Random) -> bool:
    """One call with some bad arguments; whether it was served."""
    name = chance.choice(list(FORMS))
    values, own = good(name)
    items, ends = array("q", [0, 5, 3, 1]), [1, 2]
    for of in (values, own):
        for key in of:
            if chance.random() < 0.15:
                of[key] = spoiled(of[key], chance)
    if chance.random() < 0.4:
        items = spoiled(items, chance)
    if chance.random() < 0.3:
        ends = [chance.choice([-1, 0, 1, 2, 3, 2**40]) for _ in range(chance.randrange(4))]
    small = [-(2**40), -1, 0, 1, 2, 5, ITEMS, ITEMS + 1, 2**16]
    try:
        kind = chance.randrange(4)
        if kind == 0:
            history = [chance.choice([-1, 0, 1, 2, 3, 2**40]) for _ in range(chance.randrange(4))]
            numbers = [chance.choice([-1, 0, 1, 3, 7]) for _ in range(3)]
            native.draw_samples(history, numbers[0], numbers[1], numbers[2], shuffle=True, seed=chance.getrandbits(64))
        elif kind == 1:
            total, vector, before = (spoiled(floats(8), chance) for _ in range(3))
            native.add_weighted(total, vector, before, 1.0)
        elif kind == 2:
            network(name, values, own).train(items, chance.choice([2, 2, 2, -1, 0, 3, 2**40]), ends)
        else:
            network(name, values, own).scores(chance.choice(small), chance.choice(small))
    except (InvalidMessage, OverflowError):
        return False
    return True


@pytest.mark.parametrize("calls", [2_000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_generated_bad_calls_are_refused_or_stay_inside(calls: int) -> None:
    """With guards behind every vector where the address sanitizer runs this (tests/kernels/test_sanitized_calls.py)."""
    chance = random.Random(38)
    served = sum(call(chance) for _ in range(calls))
    assert 0.02 * calls < served < 0.5 * calls
