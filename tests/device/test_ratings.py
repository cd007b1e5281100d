"""Ratings on the small device: the worker's model in plain Python, to the rounding of single precision."""

import csv
import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message

from fairfold.algorithms import rating_model, rating_updates
from fairfold.config.files import load_settings
from fairfold.device import ratings
from fairfold.device.layout import DeviceLayout, expand_seed
from fairfold.device.offline import recommend
from fairfold.device.rating_model import Hyperparameters, UserPosterior
from fairfold.device.stored_model import read_model
from fairfold.device.tasks import SmallDevice
from fairfold.errors import InvalidData, InvalidSettings
from fairfold.flower import FairStrategy, InProcessGrid, LocalFile, local_scoring
from fairfold.flower.client_store import ClientStore
from fairfold.kernels import hashing
from tests.device.test_parity import ITEMS, Twins, records_of_both, run, small_app, worker_app
from tests.support.settings import make_settings
from tests.vectors.make import FOLDER
from tests.vectors.ratings import rating_vectors

CAPACITIES = ["1x", "4x", "16x"]


def write_files(folder: Path, seed: int, devices: int = 6, users: int = 4) -> list[Path]:
    """Files of devices, whose users have rated very different numbers of items; one of them twice."""
    draw, paths = random.Random(seed), []
    for device in range(devices):
        paths.append(folder / f"{device}.csv")
        with paths[-1].open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["user", "item", "rating"])
            for user in range(users):
                items = draw.choices(range(ITEMS), k=draw.randint(1, 40))
                writer.writerows([f"u{user}", item, draw.randint(1, 10) / 2] for item in items)
    return paths


def close(mine: Any, theirs: Any) -> None:
    """Two vectors are the same to single precision, by the larger of their numbers."""
    one, other = (torch.as_tensor(of).double() for of in (mine, theirs))
    assert one.shape == other.shape
    assert float((one - other).abs().max()) <= 2e-4 * max(1.0, float(other.abs().max()))


class RatingTwins(Twins):
    """Replies and states are the same to the rounding of single precision, and in all but their numbers."""

    @staticmethod
    def compare(device: SmallDevice, message: Message, reply: Message) -> None:
        mine, theirs = records_of_both(device, message, reply)
        assert mine.keys() == theirs.keys()
        for name, number in theirs["fairfold"].items():
            expected = pytest.approx(number, rel=1e-4) if name == "quality" else number
            assert mine["fairfold"][name] == expected, name
        assert list(mine["fairfold"]) == list(theirs["fairfold"])
        assert list(mine.get("arrays", ())) == list(theirs.get("arrays", ()))
        for name, vector in theirs.get("arrays", {}).items():
            assert mine["arrays"][name].typecode == vector.typecode
            if vector.typecode == "d":  # statistics are sums of the same numbers in the same order
                assert mine["arrays"][name] == vector, name
            else:
                close(mine["arrays"][name], vector)

    @staticmethod
    def compare_states(worker: Path, small: Path) -> None:
        expected, found = ClientStore(worker).load(), ClientStore(small).load()
        for key in ("user_names", "run", "numbering", "item_numbers"):
            assert getattr(found, key) == getattr(expected, key), key
        assert found.history.keys() == expected.history.keys()
        assert all(of.equal(expected.history[name]) for name, of in found.history.items())
        pairs = [(found.acknowledged, expected.acknowledged), (found.pending, expected.pending)]
        for mine, theirs in pairs:
            assert (mine is None) == (theirs is None)
            if mine is not None and theirs is not None:
                assert mine.update_id == theirs.update_id
                assert mine.local_state.keys() == theirs.local_state.keys()
                for name, of in theirs.local_state.items():
                    close(mine.local_state[name], of)


@pytest.mark.parametrize("half", [False, True])
def test_every_reply_is_the_worker_s_and_so_are_recommendations(tmp_path: Path, half: bool) -> None:
    files = write_files(tmp_path, 1)
    twins = RatingTwins(tmp_path, files, CAPACITIES * 2)
    run(twins, 4, load_settings(None, {}, "ratings"), half=half, capacities="1x-4x-16x")
    assert not twins.problems
    assert not twins.left
    assert {"query.statistics", "query.numbering", "train", "evaluate", "query.model"} <= set(twins.compared)
    assert twins.compared.count("train") == 4 * len(files)
    for number, path in enumerate(files):
        folder, file = tmp_path / "small" / str(number), LocalFile(path)
        model = read_model(folder)
        history = file.histories(ITEMS, ratings=True)["u1"]
        expected = local_scoring.recommend(folder, file, "u1", 10)
        found = recommend(folder, model, "u1", history, 10)
        assert [score for _, score in found] == pytest.approx([score for _, score in expected], rel=1e-4)
        assert not {item for item, _ in found} & history.keys()
        scored = [item for item, score in found if score is not None and score > expected[-1][1] + 1e-3]
        assert set(scored) <= {item for item, _ in expected}


def test_under_masks_a_fleet_of_small_devices_trains_the_worker_s_model(tmp_path: Path) -> None:
    files, rules = write_files(tmp_path, 2, devices=3, users=6), {"min-cohort": 3, "privacy": "secure"}
    settings = make_settings(
        load_settings(None, {}, "ratings"), rounds=2, evaluate_every=2, capacities="1x-4x",
        privacy={"level": "secure", "min_cohort": 3},
    )  # fmt: skip
    found = []
    for make in (worker_app, small_app):
        grid = InProcessGrid(make(tmp_path, files, ["1x", "4x"], rules), [{"device": n} for n in range(len(files))])
        strategy = FairStrategy(settings, ITEMS)
        strategy.start(grid, num_rounds=settings.run.rounds)
        assert strategy.progress.history[-1].num_clients == len(files)
        found.append(strategy.progress.state)
    expected, state = found
    center = expected.full["center"]
    assert torch.equal(center[:2], state.full["center"][:2])  # from statistics, which are integers
    assert bool(expected.full[ratings.ROWS].any())
    for name, tensor in expected.full.items():  # changes are rounded to steps: some to another one
        assert torch.allclose(tensor, state.full[name], rtol=0.02, atol=0.02), name


# -- test vectors ------------------------------------------------------------------------------------------------------

VECTORS = json.loads((FOLDER / "ratings.json").read_text())


def layout_of(given: dict[str, Any]) -> DeviceLayout:
    """The layout that vectors describe."""
    sizes = (given[key] for key in ("full_size", "head", "tail", "chunk"))
    full_size, head, tail, chunk = sizes
    key, is_signed = expand_seed(int(given["seed"], 16)), int(given.get("signed", False))
    return DeviceLayout(full_size, head, tail, chunk, key, is_signed)


def close_to(one: Any, other: Any) -> bool:
    """The same to the rounding of double precision."""
    mine, theirs = (torch.tensor(of, dtype=torch.float64) for of in (one, other))
    return mine.shape == theirs.shape and torch.allclose(mine, theirs, rtol=1e-9, atol=1e-9)


def test_vectors_are_what_the_worker_computes() -> None:
    made = json.loads(json.dumps(rating_vectors()))
    assert VECTORS.keys() - {"about"} == made.keys()
    assert all(VECTORS[group] == made[group] for group in ("layouts", "statistics", "windows"))
    for case, other in zip(VECTORS["users"], made["users"], strict=True):
        assert all(close_to(case[name], other[name]) for name in other)


def test_vectors_of_rows() -> None:
    for case in VECTORS["layouts"]:
        layout = layout_of(case)
        assert f"{layout.key:x}" == case["key"]
        for coordinate, slot in zip(case["coordinates"], case["slots"], strict=True):
            row, column = divmod(coordinate, layout.chunk)
            assert layout.row(row) * layout.chunk + column == slot
    for case in VECTORS["windows"]:
        largest = layout_of(case["largest"])
        mine = DeviceLayout(largest.full_size, case["rows"] * 4, 0, 4, 0, 0)
        task = ratings.RatingTask(hyperparameters(0, 3)[1], [], mine, largest, 4, 1_000, case["round"])
        assert [task.place(item) for item in case["items"]] == case["at"]


def test_vectors_of_statistics() -> None:
    for case in VECTORS["statistics"]:
        histories = {str(user): dict(pairs) for user, pairs in enumerate(case["users"])}
        settings = {"algorithm": {"group_similar": True}, "subspace": {"method": "fair"}}
        sums = ratings.statistics(histories, range(12), settings, secure=case["secure"])
        assert {name: of.tolist() for name, of in sums.items()} == case["sums"]


def test_vectors_of_users() -> None:
    for case in VECTORS["users"]:
        known = Hyperparameters(*(case[name] for name in ("center", "metric", "variances", "regression")))
        found = UserPosterior(case["rows"], [known.centered(rating) for rating in case["ratings"]], known)
        parts, squares = found.row_sums()
        sums, units = found.sums(squares), ratings.statistic_units(len(found.row))
        sent = [[number * unit for number, unit in zip(sums, units, strict=True)]]
        for name, numbers in {
            "user_row": found.row, "row_sums": parts, "user_sums": sums, "units": units,
            "predicted": [known.predicted(found.row, row) for row in case["rows"]],
            "secure_row_steps": [[n * 2**7 for n in of] for of in ratings.quantized(parts, 2**7, ratings.ITEM_BOUND)],
            "secure_user_steps": [[n * 2**11 for n in of] for of in ratings.quantized(sent, 2**11, ratings.USER_BOUND)],
        }.items():  # fmt: skip
            assert close_to(numbers, case[name]), name


# -- parts, against the worker's in double precision -------------------------------------------------------------------


def hyperparameters(seed: int, known: int) -> tuple[rating_model.RatingHyperparameters, Hyperparameters]:
    """Random ones, for both."""
    draw = torch.Generator().manual_seed(seed)
    root = torch.randn(known, known, generator=draw).double()
    center = torch.tensor([3.4, 1.2, 0.6]).double()
    variances = torch.rand(2, known, generator=draw).double() + 0.1
    regression = torch.randn(known, known + 2, generator=draw).double()
    theirs = rating_model.RatingHyperparameters(center, root @ root.T / known, variances, regression)
    return theirs, Hyperparameters(center.tolist(), *(of.tolist() for of in (theirs.metric, variances, regression)))


@pytest.mark.parametrize(("seed", "count", "known"), [(0, 1, 2), (1, 7, 7), (2, 60, 5), (3, 12, 7)])
def test_a_user_s_posterior(seed: int, count: int, known: int) -> None:
    theirs, mine = hyperparameters(seed, known)
    draw = torch.Generator().manual_seed(seed + 100)
    rows = torch.randn(count, known + 1, generator=draw).double()
    rows[:, -1] *= 9  # numbers of ratings, some below zero
    targets = theirs.centered(torch.randint(1, 6, (count,), generator=draw).double())
    owners = torch.zeros(count, dtype=torch.int64)
    expected = rating_model.UserPosteriors.of(rows, targets, owners, 1, theirs)
    parts, squares = expected.row_sums(rows, targets, owners)
    found = UserPosterior(rows.tolist(), targets.tolist(), mine)
    found_parts, found_squares = found.row_sums()
    for one, other in (
        (found.row, expected.rows[0]), (found.covariance, expected.covariances[0]), (found.items, expected.items[0]),
        (found.features, expected.features[0]), (found_parts, parts), (found_squares, squares[0]),
        (found.sums(found_squares), expected.sums(squares)[0]),
    ):  # fmt: skip
        assert torch.allclose(torch.as_tensor(one, dtype=torch.float64), other, rtol=1e-9, atol=1e-9)
    item = rows[0].tolist()
    predicted = theirs.predicted(expected.rows, rows[:1])
    assert mine.predicted(found.row, item) == pytest.approx(float(predicted[0]), rel=1e-9)
    assert [mine.centered(4.0)] == pytest.approx(theirs.centered(torch.tensor([4.0]).double()).tolist())


def test_a_user_without_ratings_adds_nothing() -> None:
    _, mine = hyperparameters(0, 3)
    nobody = UserPosterior([], [], mine)
    parts, squares = nobody.row_sums()
    assert parts == []
    assert not any(nobody.sums(squares))


LAYOUTS = [  # whole, chunked and ranked tables of rows of four numbers
    DeviceLayout(40_000, head, tail, 4, key, 0)
    for head, tail, key in ((40_000, 0, 7), (0, 404, 2**63 + 5), (800, 100, 12_345_678_901_234_567), (4, 4, 9))
]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rows_of_a_layout_are_the_kernels(layout: DeviceLayout) -> None:
    items = torch.arange(0, 10_000, 37)
    reference = hashing.Layout(*layout[:5], signed=False)
    slots, _ = hashing.slots_and_signs(reference, items * 4)
    assert [layout.row(item) for item in items.tolist()] == (slots // 4).tolist()


@pytest.mark.parametrize("size", [0.3, 40.0, 4_000.0])
def test_changes_are_rounded_as_the_worker_s(size: float) -> None:
    draw = random.Random(5)
    changes = [[draw.gauss(0, size) for _ in range(4)] for _ in range(3)]
    for steps, bound, theirs in (
        (2**7, ratings.ITEM_BOUND, rating_updates.ITEM_FIXED_POINT),
        (2**11, ratings.USER_BOUND, rating_updates.USER_FIXED_POINT),
    ):
        expected = theirs.quantize(torch.tensor(changes).double(), torch.zeros(3, dtype=torch.int64))
        assert ratings.quantized(changes, steps, bound) == expected.tolist()
    assert ratings.quantized([[0.0, 0.0]], 2**7, 1.0) == [[0.0, 0.0]]


@pytest.mark.parametrize("known", [2, 7])
def test_units_are_the_worker_s(known: int) -> None:
    assert ratings.statistic_units(known) == rating_updates.statistic_units(known).tolist()


# -- bad input ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["user,item,rating\na,1,\n", "user,item,rating\na,1\n", "user,item,rating\na,1,nan\n"])
def test_a_rating_that_is_no_number_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    assert LocalFile(path).histories(9) == {"a": {1: None}}
    with pytest.raises(InvalidData, match="rating"):
        LocalFile(path).histories(9, ratings=True)


def test_ratings_that_no_sum_under_masks_has_room_for_are_refused() -> None:
    ratings.require_ratings({"a": {1: 101.0}}, secure=False)
    with pytest.raises(InvalidSettings, match="-100 to 100"):
        ratings.require_ratings({"a": {1: -101.0}}, secure=True)
