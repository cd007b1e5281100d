"""The page that reads like the paper's Algorithms 1 (server) and 2 (client): the oracle for everything faster."""

from collections.abc import Callable

import torch
from torch import Tensor

from fairfold.data import Dataset
from fairfold.data.synthetic import SyntheticWorld
from fairfold.federation.aggregate import ServerState, aggregate
from fairfold.federation.sampling import generator, hash_seed, sample_cohort
from fairfold.federation.settings import Settings
from fairfold.federation.train import SOLVERS, Device
from fairfold.simulate.result import Result, RoundReport, Scoring, evaluate
from fairfold.subspace import Subspace, Sums, assign_groups, nested_subspaces, parse_scheme, reduce_all

INITIAL_SPREAD = 0.1


def simulate(settings: Settings, watch: Callable[[RoundReport], None] = lambda _: None) -> Result:
    """Run a federation from its settings; ``watch`` is told of every round as it ends."""
    data, scoring = _data(settings)
    size = data.num_items * settings.factors
    capacities = parse_scheme(settings.capacities)
    group = assign_groups(data.num_users, len(capacities))
    state = ServerState(INITIAL_SPREAD * torch.randn(size, generator=generator(settings, 2)))  # Initialize θ
    private = INITIAL_SPREAD * torch.randn(data.num_users, settings.factors, generator=generator(settings, 3))

    history: list[RoundReport] = []
    while state.round_number < settings.rounds:
        subspaces = _subspaces(settings, size, state.round_number)
        state, private = run_round(state, private, data, subspaces, group, settings)
        last = state.round_number == settings.rounds
        quality = None
        if last or state.round_number % settings.evaluate_every == 0:
            quality = evaluate(state.full, private, subspaces, group, scoring, settings)
        history.append(RoundReport(state.round_number, quality))
        watch(history[-1])
    return Result.of(settings, state, history, subspaces, group, scoring)


def run_round(
    state: ServerState,
    private: Tensor,
    data: Dataset,
    subspaces: list[Subspace],
    group: Tensor,
    settings: Settings,
) -> tuple[ServerState, Tensor]:
    """One round: sample, reduce once a size, send, train, sum per size, recover once, update.

    Args:
        state: The server's, with θ.
        private: Every user's own vector; row i stands for what device i keeps on its own disk.
        data: Whose training items stand for what device i has seen.
        subspaces: S of each capacity, of this round's hash.
        group: Which capacity each user has.
        settings: Of the run.
    """
    private = private.clone()
    cohort = sample_cohort(settings, data.num_users, state.round_number)  # C ← a random set of clients
    sent = reduce_all(state.full, subspaces)  # ψ ← projection(S, θ), once a size
    noise = generator(settings, 4, state.round_number)
    sums = Sums()
    for client in cohort.tolist():
        subspace = subspaces[int(group[client])]
        compact = sent[subspace]  # Send ψᵢ
        device = Device(subspace, data.num_items, data.train.of(client), private[client], noise)
        trained, private[client] = SOLVERS[settings.solver](compact, device, settings)  # Optimise Fᵢ(Sᵢψᵢ)
        weight = float(len(device.items)) if settings.weighting == "data" else 1.0  # pᵢ
        sums.add(subspace, trained - compact if settings.aggregation == "delta" else trained, weight)
    return aggregate(state, sums, settings), private  # θ ← Σ pᵢ Sᵢψᵢ′


def _subspaces(settings: Settings, size: int, round_number: int) -> list[Subspace]:
    """One nested subspace a capacity, from this round's hash."""
    return nested_subspaces(
        size,
        parse_scheme(settings.capacities),
        seed=hash_seed(settings, round_number),
        mapping=settings.mapping,
        chunk=settings.chunk,
        sign=settings.sign,
        rule=settings.size_rule,
    )


def _data(settings: Settings) -> tuple[Dataset, Scoring]:
    world = SyntheticWorld(
        users=settings.world.users,
        items=settings.world.items,
        interactions_per_user=settings.world.interactions_per_user,
        taste_strength=settings.world.taste_strength,
        seed=settings.seed,
    )
    data = world.dataset()
    popularity = data.train.counts_by_item.float()
    references = {
        "popularity": lambda users: popularity.expand(len(users), -1),
        "best possible": world.best_scores,
    }
    return data, Scoring(data, references)
