"""Draws the convergence corollary: the error of homogeneous FAIR over rounds, log-log, with the fitted slope.

    python examples/convergence.py [convergence.png]

Needs matplotlib: pip install 'fairfold[report]'. Takes about half a minute.
"""

import sys

import torch

from experiments.convex import ConvexFederation, fitted_slope

ROUNDS = (25, 50, 100, 200, 400, 800, 1600, 3200)


def main(path: str = "convergence.png") -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for size in (5, 10, 20):
        runs = torch.tensor([ConvexFederation(size=size, rounds=ROUNDS).errors(seed) for seed in range(8)])
        mean = runs.mean(0)
        slope = fitted_slope(ROUNDS, mean.tolist())
        axes.loglog(ROUNDS, mean, "o-", label=f"{40 // size}x: slope {slope:.2f}")
        axes.fill_between(ROUNDS, runs.amin(0).clamp(min=1e-9), runs.amax(0), alpha=0.15)
        print(f"{40 // size}x: slope {slope:.2f}, errors " + " ".join(f"{error:.1e}" for error in mean))
    axes.loglog(ROUNDS, [3e-2 / rounds for rounds in ROUNDS], "k--", label="1/T")
    axes.set(xlabel="rounds T", ylabel="F(θ) − F* of the subspace", title="Homogeneous FAIR, non-i.i.d. least squares")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    print(f"drawn in {path}")


if __name__ == "__main__":
    main(*sys.argv[1:2])
