"""Masks: words of a stream cipher, added modulo 2³² to a vector, a block at a time.

A key serves one segment of one round between two devices, or one segment of a device's own mask, so its stream is used
once. Beside the vector there is one block of masks, however many keys there are.
"""

from collections.abc import Sequence

import numpy
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray

Words = NDArray[numpy.uint32]

BLOCK = 1 << 16  # words at a time: they stay within a processor's own memory
_ZEROS = bytes(4 * BLOCK)
_NONCE = bytes(16)  # counter and nonce: a key is never used twice


def add_masks(words: Words, plus: Sequence[bytes], minus: Sequence[bytes]) -> None:
    """Add the streams of some keys to a vector, in place, and take those of others away."""
    streams = [
        (Cipher(algorithms.ChaCha20(key, _NONCE), mode=None).encryptor(), operation)
        for operation, keys in ((numpy.add, plus), (numpy.subtract, minus))
        for key in keys
    ]
    stream = numpy.empty(min(BLOCK, len(words)), dtype="<u4")
    for start in range(0, len(words), BLOCK):
        block = words[start : start + BLOCK]
        mask = stream[: len(block)]
        room = mask.data.cast("B")
        for cipher, operation in streams:
            cipher.update_into(memoryview(_ZEROS)[: len(room)], room)
            operation(block, mask, out=block)
