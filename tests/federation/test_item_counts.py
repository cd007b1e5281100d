"""A count gives what a public order gives: the same model, whatever the catalogue's numbers were."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fairfold.config import Settings, read_settings
from fairfold.data import Dataset
from fairfold.data.interactions import items_at
from fairfold.data.synthetic import SyntheticDataset
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.federation.federation import number_items_by_counts
from fairfold.federation.simulation import simulate
from fairfold.runs.device_model import device_model, read_device_model, write_device_model
from fairfold.runs.loaded import item_name, load_run, read_history
from fairfold.runs.report import read_run
from fairfold.runs.train import run
from fairfold.subspace import Capacity
from tests.support.federations import tiny_data
from tests.support.settings import make_settings

RANKED: dict[str, Any] = {"algorithm": "closed_form", "factors": 3, "chunk": 3, "support": 4, "tail_share": 0.25}
CHOICES: list[dict[str, Any]] = [
    RANKED,
    RANKED | {"support": 0},
    {"algorithm": "closed_form", "factors": 3},
    {"algorithm": "gradient", "factors": 3, "model": "neumf", "local_lr": 0.05, "rehash": True},
    {"algorithm": "gradient", "factors": 3, "model": "mf", "chunk": 1, "method": "fair_hom"},
]


def wanted(**changes: Any) -> Settings:
    base: dict[str, Any] = {
        "capacities": "1x-2x-8x",
        "rounds": 3,
        "clients_per_round": 8,
        "evaluate_every": 3,
        "top": 5,
    }
    return make_settings(**base | changes)


def ordered(data: Dataset) -> Dataset:
    """Numbered by counts, as prepared data sets are."""
    return data.renumbered(data.train.counts_by_item.argsort(descending=True, stable=True).argsort())


def shuffled_but_for_ties(data: Dataset, leading: int, seed: int) -> Tensor:
    """New numbers at random; items of equal counts, and all that do not lead, keep their order."""
    place = torch.randperm(data.num_items, generator=torch.Generator().manual_seed(seed))
    counts = data.train.counts_by_item
    tied = counts.clamp(min=counts[min(leading, data.num_items - 1)])  # the first that does not lead, and what is below
    for count in set(tied.tolist()):
        here = (tied == count).nonzero().flatten()
        place[here] = place[here].sort().values
    return place


@pytest.mark.parametrize("backend", ["sequential", "batched"])
@pytest.mark.parametrize("changes", CHOICES, ids=lambda changes: " ".join(map(str, changes.values())))
def test_the_same_model_whatever_the_numbers_of_the_catalogue(changes: dict[str, Any], backend: str) -> None:
    data = ordered(tiny_data(2, users=24, items=90))
    public = wanted(**changes, backend=backend)
    counts = wanted(**changes, backend=backend, popularity="counts")
    expected = simulate(public, data=data)
    counted_items = number_items_by_counts(data, counts).counted
    assert counted_items is not None
    place = shuffled_but_for_ties(data, len(counted_items.leading), seed=5)
    found = simulate(counts, data=data.renumbered(place))
    assert all(torch.equal(found.state.full[name], full) for name, full in expected.state.full.items())
    assert all(torch.equal(found.local_state[name], own) for name, own in expected.local_state.items())
    assert found.quality == expected.quality
    assert found.counted is not None
    assert torch.equal(place[: len(found.counted.leading)], found.counted.leading.long())


def test_any_shuffle_reaches_about_the_quality_of_the_order_it_destroyed() -> None:
    data = ordered(SyntheticDataset(users=150, items=1_000, interactions_per_user=40, seed=3).dataset())
    mixed = data.renumbered(torch.randperm(1_000, generator=torch.Generator().manual_seed(0)))
    common: dict[str, Any] = {"algorithm": "closed_form", "factors": 8, "support": 5, "rounds": 30, "top": 20}
    common |= {"clients_per_round": 60, "capacities": "4x-16x"}
    public = simulate(make_settings(**common), data=data).quality
    counted = simulate(make_settings(**common | {"popularity": "counts"}), data=mixed).quality
    lost = simulate(make_settings(**common), data=mixed).quality
    assert counted == pytest.approx(public, rel=0.05)
    assert lost < 0.85 * public  # or the order would not matter here


def test_a_count_sums_the_clients_that_contribute() -> None:
    data = tiny_data(3, users=30, items=40)
    counted_items = number_items_by_counts(data, wanted(**RANKED, popularity="counts")).counted
    assert counted_items is not None
    assert torch.equal(
        counted_items.counts, data.train.counts_by_item[items_at(torch.arange(40), counted_items.leading)]
    )


@pytest.mark.parametrize("backend", ["sequential", "batched"])
def test_devices_that_fail_are_left_out_of_the_count(backend: str) -> None:
    data = tiny_data(1, users=40, items=60)
    chosen = wanted(
        **RANKED | {"support": 18, "capacities": "1x"}, popularity="counts", backend=backend,
        faults={"drop": 0.1, "nan": 0.1},
    )  # fmt: skip
    counted_items = number_items_by_counts(data, chosen).counted
    assert counted_items is not None
    assert counted_items.asked == 40
    assert 20 < counted_items.devices < 40
    assert int(counted_items.counts.sum()) < len(data.train)
    # Support is what was counted, not what is.
    assert (
        len(counted_items.leading)
        == int((counted_items.counts >= 18).sum())
        < int((data.train.counts_by_item >= 18).sum())
    )
    with pytest.raises(InvalidData, match="of 40 devices contributed"):
        number_items_by_counts(data, wanted(**RANKED, popularity="counts", faults={"drop": 1.0}))


def test_the_cost_is_in_the_first_rounds_bytes() -> None:
    data = ordered(tiny_data(2, users=24, items=90))
    found = simulate(wanted(**RANKED, popularity="counts"), data=data)
    plain = simulate(wanted(**RANKED), data=data)
    counted_items = found.counted
    assert counted_items is not None
    assert plain.counted is None
    owned = len(counted_items.leading)
    assert 0 < owned < 90
    assert counted_items.bytes_up == 24 * 4 * 90  # a number an item
    assert counted_items.bytes_down == 24 * 4 * owned  # the items that lead
    more = [one.bytes_down - other.bytes_down for one, other in zip(found.history, plain.history, strict=True)]
    assert more == [counted_items.bytes_down, 0, 0]
    assert [one.bytes_up - other.bytes_up for one, other in zip(found.history, plain.history, strict=True)] == [
        counted_items.bytes_up, 0, 0
    ]  # fmt: skip


@pytest.mark.parametrize("backend", ["sequential", "batched"])
def test_a_run_goes_on_with_the_order_it_began_with(tmp_path: Path, backend: str) -> None:
    chosen = wanted(**RANKED, popularity="counts", backend=backend, rounds=4, data={"users": 40, "items": 200})
    whole = run(chosen, tmp_path / "whole", checkpoint_every=1)
    run(chosen.with_changes({"run.rounds": 2}), tmp_path / "broken", checkpoint_every=1)
    again = run(chosen, tmp_path / "broken", resume=True, checkpoint_every=1)
    for name, tensor in whole.result.state.full.items():
        assert torch.equal(again.result.state.full[name], tensor)
    assert [report.bytes_up for report in again.result.history] == [report.bytes_up for report in whole.result.history]


def test_reports_of_a_run_name_items_by_the_catalogue(tmp_path: Path) -> None:
    chosen = wanted(**RANKED, popularity="counts", data={"users": 40, "items": 200})
    finished = run(chosen, tmp_path / "run")
    counted = finished.result.counted
    assert counted is not None
    sentence = read_run(tmp_path / "run").popularity
    assert sentence is not None
    assert sentence.startswith("Popularity: counted once by 40 of 40 devices, ")
    assert f"{len(counted.leading):,} items lead" in sentence
    opened = load_run(tmp_path / "run")
    data = opened.interactions
    names = [item_name(rank, data) for rank in range(200)]
    assert names == [f"#{item}" for item in items_at(torch.arange(200), counted.leading).tolist()]
    assert names != [f"#{rank}" for rank in range(200)]
    (tmp_path / "history").write_text("\n".join(names[:3]), encoding="utf-8")
    assert read_history(tmp_path / "history", data).items.tolist() == [0, 1, 2]
    path = tmp_path / "device.safetensors"
    device = device_model(opened, Capacity.parse("8x"))
    write_device_model(opened, device, path, ("NDCG@5", 0.0, 0.0))
    leading = read_device_model(path)[0].leading
    assert leading is not None
    assert torch.equal(leading, counted.leading)


def test_without_popularity_ranked_falls_back_to_hashing() -> None:
    data = tiny_data(2, users=24, items=90)
    for changes, mapping in (
        ({"algorithm": "closed_form", "factors": 3}, {"mapping": "element"}),
        (CHOICES[-1] | {"chunk": 1}, {"mapping": "element"}),
    ):
        without_chunk = {key: value for key, value in changes.items() if key != "chunk"}
        hashed = simulate(wanted(**without_chunk, **mapping), data=data)
        found = simulate(wanted(**without_chunk, popularity="none"), data=data)
        assert torch.equal(found.state.full["item.weight"], hashed.state.full["item.weight"])
    ratings = make_settings(algorithm="ratings", popularity="none")
    assert not ratings.algorithm.groups_similar_items(ratings)  # type: ignore[attr-defined]
    assert read_settings(ratings.plain()) == ratings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mapping": "chunk"}, "it needs 'ranked'"),
        (
            {"method": "heterofl", "algorithm": "gradient"},
            "unknown key 'subspace.popularity' with subspace.method='heterofl'",
        ),
        ({"method": "fedavg", "algorithm": "gradient"}, "'subspace.popularity' with subspace.method='fedavg'"),
        ({"algorithm": "ratings", "group_similar": True}, "group_similar=true needs sums of ratings"),
        ({"model": "mlp", "data": "mnist"}, "it needs 'ranked'"),
    ],
)
def test_counts_that_nothing_needs_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidSettings, match=message):
        make_settings(**{"popularity": "counts"} | changes)


def test_ratings_are_counted_without_alike() -> None:
    counted = make_settings(algorithm="ratings", popularity="counts")
    assert not counted.algorithm.groups_similar_items(counted)  # type: ignore[attr-defined]
    ordered_by_all = make_settings(algorithm="ratings")
    assert ordered_by_all.algorithm.groups_similar_items(ordered_by_all)  # type: ignore[attr-defined]
