"""How much of the devices' memory a chain leaves unused: the paper's powers of two against the fitted base.

    python benchmarks/chain_waste.py

Budgets are drawn log-uniformly between 1/64 and 1 of the full vector, 1,000 fleets of each size.
"""

from collections.abc import Callable

import torch

from fairfold.subspace import fit_sizes

FULL_SIZE = 10_000_000
FLEETS = 1_000


def powers_of_two(limits: list[int], full_size: int) -> list[int]:
    return [full_size if limit >= full_size else 1 << (limit.bit_length() - 1) for limit in limits]


def waste(rule: Callable[[list[int], int], list[int]], fleets: list[list[int]]) -> torch.Tensor:
    unused = []
    for limits in fleets:
        sizes = rule(limits, FULL_SIZE)
        unused.append(sum(1 - size / limit for size, limit in zip(sizes, limits, strict=True)) / len(limits))
    return torch.tensor(unused)


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    print(f"{'devices':>8} {'paper':>16} {'fitted':>16} {'paper/fitted':>13}")
    for devices in (1, 2, 3, 5, 10, 100):
        exponents = -6 * torch.rand(FLEETS, devices, generator=generator, dtype=torch.float64)
        fleets = [[int(limit) for limit in row] for row in (FULL_SIZE * 2**exponents).tolist()]
        paper, fitted = waste(powers_of_two, fleets), waste(fit_sizes, fleets)
        ratio = float(paper.mean() / fitted.mean().clamp(min=1e-12))
        shown = f"{ratio:13.2f}" if ratio < 1e3 else f"{'all of it':>13}"
        print(
            f"{devices:8} {paper.mean():8.1%} ± {paper.std():5.1%} {fitted.mean():8.1%} ± {fitted.std():5.1%} {shown}"
        )


if __name__ == "__main__":
    main()
