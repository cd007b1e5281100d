"""How many devices hold each item, as sums that tell nothing else: a count under pairwise masks.

Devices stand in a ring, and each shares a secret key with some neighbours on either side. Both ends of a pair draw the
same uniform words from their key; one adds them to its counts, the other takes them off. What a device sends is then
uniform to whoever lacks its keys, and in the sum the masks cancel: the words are integers of a fixed width, whose sums
wrap around, so the total is exact. No item is held by more devices than there are, so the narrowest word that holds
their number serves: one byte an item for up to 255 devices.

The catalogue is counted a window at a time. A device that counts holds one window and one mask, whatever n.

A device that does not answer leaves the masks of its pairs behind. Its neighbours then tell the server their keys with
it, and the server takes these masks off. A device tells keys only while enough of its neighbours stay in the count,
and is not counted otherwise. So whoever is counted stands in a sum with four others at least, where nine or more
devices were asked: the server can see no sum of fewer.
"""

import hashlib
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairfold.data import Interactions
from fairfold.errors import InvalidData

WINDOW = 65_536
"""Items counted at a time."""

NEIGHBOURS = 12
"""Devices with which a device shares a key: six on either side of the ring, or all others where these are fewer."""

STAYING = 4
"""Neighbours that a counted device keeps, or half of them where it has fewer than eight. A third of twelve, so that a
device that answers hardly ever goes uncounted, even where three in ten are silent."""

FEWEST = 3
"""Devices that a sum needs: a sum of one is no secret, and of two none between them."""

KEY_BYTES = 32
"""Of a pair's key, and of what a device publishes for others to agree on keys with it."""

NAME_BYTES = 4
"""Of the number that names a device, or an item."""

Words = NDArray[np.unsignedinteger[Any]]
Flags = NDArray[np.bool_]


def word_for(devices: int) -> np.dtype[Any]:
    """The narrowest unsigned integers that hold how many devices there are."""
    return np.min_scalar_type(devices).newbyteorder("<")


def neighbours(devices: int) -> NDArray[np.int64]:
    """The neighbours of every place in the ring, a line each."""
    half = NEIGHBOURS // 2
    steps = [*range(-half, 0), *range(1, half + 1)] if devices > NEIGHBOURS else range(1, devices)
    return (np.arange(devices)[:, None] + np.array(steps, dtype=np.int64)) % devices


def staying(answered: Flags) -> Flags:
    """Who is counted of those who answered: whoever keeps enough neighbours who are counted as well."""
    near, counted = neighbours(len(answered)), answered
    needed = min(STAYING, -(-near.shape[1] // 2))
    while True:
        left = counted & (counted[near].sum(1) >= needed)
        if bool((left == counted).all()):
            break
        counted = left
    if int(counted.sum()) < FEWEST:
        raise InvalidData(
            f"a count that {int(answered.sum())} of {len(answered)} devices answered",
            f"at least {FEWEST} neighbours, so that no sum tells what one of them holds",
            "Ask more devices, or take the catalogue's own order (popularity='catalogue').",
        )
    return counted


def pair_key(secret: int, one: int, other: int) -> bytes:
    """The key of two devices in a simulation; real ones agree on it, with keys that each publishes."""
    return hashlib.sha256(struct.pack("<QQQ", secret, min(one, other), max(one, other))).digest()


def mask(key: bytes, start: int, length: int, word: np.dtype[Any]) -> Words:
    """The uniform words of a pair for the window that begins at an item."""
    return np.frombuffer(hashlib.shake_128(key + struct.pack("<Q", start)).digest(length * word.itemsize), word)


def windows(num_items: int) -> Iterator[tuple[int, int]]:
    """First item and length of each part of the catalogue."""
    for start in range(0, num_items, WINDOW):
        yield start, min(WINDOW, num_items - start)


def said(
    mine: NDArray[np.int64], start: int, length: int, place: int, keys: Mapping[int, bytes], word: np.dtype[Any]
) -> Words:
    """What a device sends of a window: 1 for each item it holds there, under the masks of all its pairs.

    Args:
        mine: The items it holds, ascending.
        start: Where the window begins.
        length: Of the window.
        place: Of the device in the ring.
        keys: Those it shares, by the places of its neighbours.
        word: See :func:`word_for`.
    """
    words = np.zeros(length, word)
    first, last = np.searchsorted(mine, (start, start + length))
    words[mine[first:last] - start] = 1
    for other, key in keys.items():
        _add(words, mask(key, start, length, word), place < other)
    return words


def masked_count(histories: Interactions, devices: Tensor, answered: Flags, secret: int) -> Tensor:
    """The count as devices and server carry it out: how many of those who are counted hold each item.

    Args:
        histories: Of everybody; a device reads its own alone.
        devices: Who is asked, by their places in the ring.
        answered: Which places do.
        secret: What the keys of all pairs come from, known to no server.
    """
    near, counted, word = neighbours(len(devices)), staying(answered), word_for(len(devices))
    totals = torch.zeros(histories.num_items, dtype=torch.int64)
    places = [int(place) for place in counted.nonzero()[0]]
    for start, length in windows(histories.num_items):
        total = np.zeros(length, word)
        for place in places:
            keys = {int(other): pair_key(secret, place, int(other)) for other in near[place]}
            _add(total, said(histories.of(int(devices[place])).numpy(), start, length, place, keys, word), True)
            for other, key in keys.items():
                if not counted[other]:  # told by this device, to take off what its neighbour left behind
                    _add(total, mask(key, start, length, word), place > other)
        totals[start : start + length] = torch.from_numpy(total.astype(np.int64))
    return totals


def bytes_of_count(num_items: int, answered: Flags, leading: int) -> tuple[int, int]:
    """What all devices that were asked receive and send: keys, counts, masks to take off, the items that lead."""
    near, counted = neighbours(len(answered)), staying(answered)
    devices, degree = near.shape
    left_behind = int((counted[:, None] & ~counted[near]).sum())
    down = devices * (KEY_BYTES * degree + NAME_BYTES * leading) + NAME_BYTES * left_behind
    up = devices * (KEY_BYTES + num_items * word_for(devices).itemsize) + KEY_BYTES * left_behind
    return down, up


def _add(words: Words, more: Words, positive: bool) -> None:
    """Add or take off, in place: sums wrap around."""
    (np.add if positive else np.subtract)(words, more, out=words)
