"""Interactions in every form that people have them in are one and the same data set."""

from pathlib import Path
from typing import Any

import numpy
import polars
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import TensorDataset

from fairfold.errors import InvalidData, InvalidSettings
from fairfold.estimator.inputs import read_interactions

scipy_sparse = pytest.importorskip("scipy.sparse", reason="the form of implicit's users")

RANDOM = numpy.random.default_rng(0)
USERS = RANDOM.integers(0, 30, 400)
ITEMS = RANDOM.integers(0, 50, 400)
RATINGS = RANDOM.integers(1, 6, 400).astype(float)
COLUMNS = {"user_id": USERS, "item_id": ITEMS, "rating": RATINGS}


class Rows(TorchDataset[Any]):
    def __init__(self, named: bool) -> None:
        self.named = named

    def __len__(self) -> int:
        return len(USERS)

    def __getitem__(self, place: int) -> Any:
        row = torch.tensor(USERS[place]), torch.tensor(ITEMS[place]), float(RATINGS[place])
        return dict(zip(COLUMNS, row, strict=True)) if self.named else row


def pandas_frame() -> Any:
    return pytest.importorskip("pandas").DataFrame(COLUMNS)


def written(folder: Path, ending: str) -> Path:
    path = folder / f"mine.{ending}"
    frame = polars.DataFrame(COLUMNS)
    if ending == "inter":  # RecBole's own
        frame = frame.rename({"user_id": "user_id:token", "item_id": "item_id:token", "rating": "rating:float"})
        frame.write_csv(path, separator="\t")
    else:
        frame.write_csv(path)
    return path


FORMS: dict[str, Any] = {
    "polars": lambda _: polars.DataFrame(COLUMNS),
    "lazy polars": lambda _: polars.DataFrame(COLUMNS).lazy(),
    "pandas": lambda _: pandas_frame(),
    "pandas with missing rows": lambda _: pytest.importorskip("pandas").concat(
        [pandas_frame(), pytest.importorskip("pandas").DataFrame({"user_id": [None], "item_id": [3], "rating": [1.0]})]
    ),
    "array": lambda _: numpy.stack([USERS, ITEMS, RATINGS], axis=1),
    "structured array": lambda _: polars.DataFrame(COLUMNS).to_numpy(structured=True),
    "tensor": lambda _: torch.from_numpy(numpy.stack([USERS, ITEMS, RATINGS], axis=1)),
    "columns": lambda _: (USERS, ITEMS, RATINGS),
    "rows": lambda _: list(zip(USERS.tolist(), ITEMS.tolist(), RATINGS.tolist(), strict=True)),
    "torch Dataset of tuples": lambda _: Rows(named=False),
    "torch Dataset of dicts": lambda _: Rows(named=True),
    "TensorDataset": lambda _: TensorDataset(*(torch.from_numpy(column) for column in COLUMNS.values())),
    "CSV": lambda folder: written(folder, "csv"),
    "RecBole": lambda folder: str(written(folder, "inter")),
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIRFOLD_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_data(form: str, tmp_path: Path) -> None:
    wanted = read_interactions(polars.DataFrame(COLUMNS), {"ratings": True}).data
    taken = read_interactions(FORMS[form](tmp_path), {"ratings": True})
    found = taken.data
    assert taken.integer_ids == (True, True)
    assert (found.user_ids, found.item_ids) == (wanted.user_ids, wanted.item_ids)
    for mine, other in ((found.train, wanted.train), (found.test, wanted.test)):
        assert torch.equal(mine.items, other.items)
        assert torch.equal(mine.offsets, other.offsets)
        assert mine.ratings is not None
        assert other.ratings is not None
        assert torch.equal(mine.ratings, other.ratings)


def test_a_sparse_matrix_is_its_rows_and_columns() -> None:
    matrix = scipy_sparse.csr_array((numpy.ones(len(USERS)), (USERS, ITEMS)))
    pairs = {(int(user), int(item)) for user, item in zip(USERS, ITEMS, strict=True)}
    places = torch.from_numpy(numpy.stack([USERS, ITEMS]))
    tensor = torch.sparse_coo_tensor(places, torch.ones(len(USERS)), check_invariants=True)
    for form in (matrix, matrix.tocsc(), tensor):
        data = read_interactions(form, {"split": 1.0}).data
        assert data.user_ids is not None
        assert data.item_ids is not None
        users, items = data.train.users.tolist(), data.train.items.tolist()
        assert {(int(data.user_ids[u]), int(data.item_ids[i])) for u, i in zip(users, items, strict=True)} == pairs
        assert not len(data.test)


def test_a_stored_zero_is_no_interaction() -> None:
    places, values = torch.tensor([[0, 0, 1], [0, 1, 0]]), torch.tensor([3.0, 0.0, 2.0])
    tensor = torch.sparse_coo_tensor(places, values, check_invariants=True)
    for form in (scipy_sparse.coo_array((values.numpy(), tuple(places.numpy()))), tensor):
        data = read_interactions(form, {"split": 1.0}).data
        assert sorted(zip(data.train.users.tolist(), data.train.items.tolist(), strict=True)) == [(0, 0), (1, 0)]
        assert data.num_items == 1


def test_text_stays_text_and_titles_go_with_ids() -> None:
    frame = polars.DataFrame({"user": ["ann", "ann", "bob"], "item": ["007", "b", "007"]})
    taken = read_interactions(frame, {}, {"007": "Bond"})
    assert taken.integer_ids == (False, False)
    assert taken.data.item_ids is not None
    assert taken.data.titles is not None
    assert dict(zip(taken.data.item_ids, taken.data.titles, strict=True)) == {"007": "Bond", "b": ""}


def test_what_cannot_be_read_is_refused_with_what_would_be() -> None:
    with pytest.raises(InvalidData, match=r"the table has no column .* fairfold\.fit\(.*item_column='thing'\)\.$"):
        read_interactions(polars.DataFrame({"user": [1], "thing": [2]}), {})
    with pytest.raises(InvalidData, match=r"Name it by item_column=\.$"):
        read_interactions(polars.DataFrame({"user": [1], "thing": [2]}), {"item_column": "think"})
    named = read_interactions(polars.DataFrame({"user": [1], "thing": [2]}), {"item_column": "thing"})
    assert named.data.num_items == 1
    with pytest.raises(InvalidData, match="csr_array"):
        read_interactions(numpy.ones((5, 7)), {})
    with pytest.raises(InvalidData, match="DataFrame"):
        read_interactions(17, {})
    with pytest.raises(InvalidSettings, match="did you mean 'item_column'"):
        read_interactions(polars.DataFrame({"user": [1], "item": [2]}), {"item_colum": "item"})
