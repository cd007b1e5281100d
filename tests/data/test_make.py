"""The world on disk: exact sizes, planted tastes, the same for every chunk size, in bounded memory."""

from pathlib import Path

import numpy
import pytest
import torch

from fairfold.data import load
from fairfold.data.make import World, make
from fairfold.errors import InvalidData


def test_a_world_is_a_data_set_of_the_size_asked_for(tmp_path: Path) -> None:
    world = World(users=300, items=2000, interactions=20_000, seed=1)
    prepared = make(world, tmp_path / "world", chunk=3000)
    data = load(tmp_path / "world")
    assert (data.num_users, data.num_items) == (300, 2000)
    assert len(data.train) + len(data.test) == 20_000
    assert prepared.manifest["generator"]["seed"] == 1
    assert prepared.manifest["generator"]["name"] == "fairfold.data.make"
    in_all = data.train.counts_by_user + data.test.counts_by_user
    assert int(in_all.min()) >= 1
    assert torch.equal(data.train.counts_by_user, torch.clamp((in_all.double() * 0.7 + 0.5).floor(), min=1).long())
    for user in range(300):
        train, test = data.train.of(user), data.test.of(user)
        assert len({*train.tolist(), *test.tolist()}) == len(train) + len(test)
        assert torch.equal(train, train.sort().values)


def test_users_prefer_their_own_taste_and_popular_items(tmp_path: Path) -> None:
    make(World(users=400, items=4000, interactions=20_000, tastes=8, loyalty=0.9), tmp_path / "world")
    train = load(tmp_path / "world").train
    own = (train.items % 8 == train.users % 8).float().mean()
    assert 0.8 < own < 0.95
    popularity = train.counts_by_item.numpy()
    assert popularity[:400].sum() > 3 * popularity[-400:].sum()
    assert numpy.corrcoef(numpy.log(numpy.arange(1, 4001)), popularity)[0, 1] < -0.5


def test_the_same_seed_gives_the_same_world(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make(World(50, 500, 2000, seed=seed), tmp_path / name)
    first, same, other = (load(tmp_path / name).train.items for name in "abc")
    assert torch.equal(first, same)
    assert not torch.equal(first[:1000], other[:1000])


@pytest.mark.parametrize(
    "world",
    [
        World(1, 2, 1, tastes=1),
        World(10, 20, 100, tastes=10, exponent=3.0),  # everyone has half the catalogue
        World(7, 100, 200, tastes=1, exponent=1.0, activity=3.0),
        World(100, 100, 100, loyalty=1.0),
    ],
)
def test_worlds_at_the_edge(world: World, tmp_path: Path) -> None:
    make(world, tmp_path / "world", chunk=7)
    data = load(tmp_path / "world")
    assert len(data.train) + len(data.test) == world.interactions


@pytest.mark.parametrize(
    "wrong",
    [{"users": 0}, {"items": 1}, {"interactions": 5}, {"tastes": 0}, {"loyalty": 2.0}, {"split": 0.0}, {"items": 20}],
)
def test_worlds_that_cannot_be(wrong: dict[str, int]) -> None:
    with pytest.raises(InvalidData):
        World(**{"users": 10, "items": 1000, "interactions": 2000, **wrong})
