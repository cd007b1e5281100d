"""Subspaces in a minute: reduce, train inside, recover, and what a small device's work is worth to a large one.

python examples/quickstart.py
"""

import torch

from fairfold import Subspace


def main() -> None:
    full = torch.randn(1_000_000)
    small = Subspace(full.numel(), size=62_500, seed=7)  # a device that can hold a sixteenth
    large = Subspace(full.numel(), size=250_000, seed=7)  # and one that can hold a quarter

    compact = small.reduce(full)  # what the server sends to the small device
    print(f"{small}: {compact.numel() * 4 / 1e6:.2f} MB instead of {full.numel() * 4 / 1e6:.2f} MB")

    compact += 0.1  # stands for training inside the subspace
    in_large = small.unfold(compact, large)  # the same update in the larger device's terms
    print(
        "nested:",
        small.nests_in(large),
        "| lossless upwards:",
        bool(torch.equal(small.recover(compact), large.recover(in_large))),
    )


if __name__ == "__main__":
    main()
