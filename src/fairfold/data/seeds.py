"""Random generators named by numbers, so that no two purposes share a stream by accident."""

import numpy as np
import torch

from fairfold.errors import InvalidSettings


def generator(*words: int) -> torch.Generator:
    """A CPU generator for a list of non-negative numbers, e.g. (seed, epoch).

    The words are mixed: (0, 1) and (1, 0) have nothing in common, which adding them would not give. They are
    mixed into 32 bits, because that is what torch's CPU generator uses of a seed.
    """
    if min(words, default=0) < 0:
        raise InvalidSettings(f"seed words {list(words)}", "0 or more", "Choose a seed that is not negative.")
    state = np.random.SeedSequence(words).generate_state(1, np.uint32)
    return torch.Generator().manual_seed(int(state[0]))


def numpy_generator(*words: int) -> np.random.Generator:
    """The same for numpy, with numbers that are the same on every machine."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(list(words))))
