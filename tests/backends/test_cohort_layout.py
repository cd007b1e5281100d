"""A cohort's samples, worked out for all clients at once, are those that the readable loop draws client by client."""

from typing import Any
from unittest import mock

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fairfold.backends.cohort_layout import FLAGS_PER_KEY, distinct, draw
from fairfold.backends.cuda_graph import GraphBackend
from fairfold.federation.federation import Federation
from fairfold.federation.randomness import Rejections
from fairfold.federation.round import run_round
from fairfold.subspace import checks
from tests.support.federations import tiny_data, tiny_settings


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**16),
    st.integers(1, 7),
    st.integers(1, 3),
    st.integers(1, 3),
    st.booleans(),
    st.booleans(),
)
def test_samples_are_those_of_the_loop(
    seed: int, batch: int, epochs: int, negatives: int, shuffle: bool, ratings: bool
) -> None:
    changes: dict[str, Any] = {"model": "neumf-mlp"} if ratings else {"num_negatives": negatives}
    chosen = tiny_settings(seed=seed, batch_size=batch, local_epochs=epochs, shuffle=shuffle, **changes)
    clients = Federation.of(chosen, tiny_data(seed, 7, 20, ratings)).clients
    work = clients.training
    client_ids = torch.randperm(7, generator=torch.Generator().manual_seed(seed))[:4].tolist()
    samples = draw(clients, client_ids, round_number=seed % 5).samples()
    assert sorted(samples.client_ids) == sorted(client_ids)
    steps = [len(work.batches(client, torch.Generator())) for client in samples.client_ids]
    assert steps == sorted(steps, reverse=True)
    assert len(samples.sizes) == steps[0]
    for place, client in enumerate(samples.client_ids):
        expected = work.batches(client, clients.source(seed % 5, client))
        assert not samples.sizes[len(expected) :, place].any()
        assert not samples.starts[len(expected) :, place].any()
        for step, mine in enumerate(expected):
            start = int(samples.starts[step, place])
            part = slice(start, start + int(samples.sizes[step, place]))
            assert torch.equal(samples.items[part], mine.items)
            assert bool((samples.owner[part] == place).all())
            if ratings:
                assert samples.targets is not None
                assert mine.targets is not None
                assert torch.equal(samples.targets[part], mine.targets)


@given(st.lists(st.integers(0, 999), min_size=1, max_size=60), st.sampled_from([1, 10 * FLAGS_PER_KEY]))
def test_distinct_keys(keys: list[int], spread: int) -> None:
    given_keys, bounds = spread * torch.tensor(keys), [300 * spread, 700 * spread, 1000 * spread]
    found, places, ends = distinct(given_keys, bounds)
    assert found.tolist() == [spread * key for key in sorted(set(keys))]
    assert torch.equal(found[places.long()], given_keys)
    assert ends == [len({key for key in keys if key * spread < bound}) for bound in bounds]


def test_a_round_does_not_look_at_checked_numbers_again() -> None:
    world = Federation.of(tiny_settings(capacities="1x-2x-4x", method="fair"), tiny_data(1, 9, 40))
    backend = GraphBackend(world.sampler, world.clients, torch.device("cpu"))
    with mock.patch.object(checks, "check_finite") as looked:
        run_round(world.initial(), world.sampler, world.clients, Rejections(), backend)
    assert not looked.called
