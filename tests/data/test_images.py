"""Images, their labels and their writers."""

import gzip
import json
import struct
from pathlib import Path

import numpy
import pytest
import torch

from fairfold.data import load, load_images, prepare
from fairfold.data.images import read_idx
from fairfold.errors import InvalidData


@pytest.fixture(autouse=True)
def no_data_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Images known by name would be taken before those beside a folder."""
    monkeypatch.delenv("FAIRFOLD_DATA", raising=False)


def idx(array: numpy.ndarray, code: int) -> bytes:
    header = bytes([0, 0, code, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.astype(array.dtype.newbyteorder(">")).tobytes()


def mnist(folder: Path, packed: bool = True, sizes: tuple[int, int] = (6, 4)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for prefix, size in zip(("train", "t10k"), sizes, strict=True):
        images = (numpy.arange(size * 9).reshape(size, 3, 3) % 256).astype(numpy.uint8)
        labels = (numpy.arange(size) % 3).astype(numpy.uint8)
        for name, content in (("images-idx3-ubyte", idx(images, 8)), ("labels-idx1-ubyte", idx(labels, 8))):
            path = folder / f"{prefix}-{name}{'.gz' if packed else ''}"
            path.write_bytes(gzip.compress(content) if packed else content)
    return folder


def qmnist(folder: Path, sizes: tuple[int, int] = (6, 9)) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for split, size in zip(("train", "test"), sizes, strict=True):
        table = numpy.zeros((size, 8), dtype=numpy.int32)
        table[:, 0] = numpy.arange(size) % 3
        table[:, 2] = 100 * (split == "test") + numpy.arange(size) // 2
        (folder / f"qmnist-{split}-labels-idx2-int.gz").write_bytes(gzip.compress(idx(table, 12)))
    return folder


@pytest.mark.parametrize("packed", [True, False])
def test_mnist(packed: bool, tmp_path: Path) -> None:
    data = load_images(mnist(tmp_path / "mnist", packed))
    assert data.train.images.shape == (6, 3, 3)
    assert data.train.images.flatten().tolist() == list(range(54))
    assert data.test.labels.tolist() == [0, 1, 2, 0]
    assert data.train.writers is None
    assert data.num_classes == 3


@pytest.mark.parametrize("where", ["beside", "inside", "named"])
def test_writers_join_their_images(where: str, tmp_path: Path) -> None:
    folder = qmnist(tmp_path / "writers")
    images = mnist({"beside": tmp_path / "mnist", "inside": folder, "named": tmp_path / "elsewhere"}[where])
    data = load_images(folder, images=images) if where == "named" else load_images(folder)
    assert data.writer_ids == ["0", "1", "2", "100", "101"]
    assert data.train.writers is not None
    assert data.test.writers is not None
    assert data.train.writers.tolist() == [0, 0, 1, 1, 2, 2]
    assert data.test.writers.tolist() == [3, 3, 4, 4]  # the labels beyond the images are QMNIST's own
    assert data.counts() == {"train": 6, "test": 4, "classes": 3, "train_writers": 3, "test_writers": 2}


def test_options_about_users_mean_nothing_for_images_and_it_is_said(tmp_path: Path) -> None:
    first = prepare(mnist(tmp_path / "mnist"), top_users=100)
    assert "top_users means nothing for images" in first.note
    assert prepare(tmp_path / "mnist").folder == first.folder


def test_images_are_mapped_and_may_be_written_to_without_harm(tmp_path: Path) -> None:
    folder = prepare(mnist(tmp_path / "mnist")).folder
    load_images(folder).train.images[:] = 0
    assert load_images(folder).train.images.sum() == sum(range(54))


def test_femnist(tmp_path: Path) -> None:
    for split, users in (("train", ["f1", "f2"]), ("test", ["f2", "f3"])):
        content = {
            "users": users,
            "num_samples": [2, 2],
            "user_data": {user: {"x": [[0.0] * 783 + [1.0], [0.5] * 784], "y": [3, 61]} for user in users},
        }
        (tmp_path / split).mkdir()
        (tmp_path / split / "all_data_0.json").write_text(json.dumps(content))
    data = load_images(tmp_path)
    assert data.writer_ids == ["f1", "f2", "f3"]
    assert data.test.writers is not None
    assert data.test.writers.tolist() == [1, 1, 2, 2]
    assert data.train.images[0, 27, 27] == 255
    assert data.train.images[1].float().mean() == 128
    assert data.num_classes == 62


@pytest.mark.parametrize(
    "content",
    [
        {},
        {"users": ["a"]},
        {"users": ["a"], "user_data": {"a": {"x": [[2.0] * 784], "y": [1]}}},
        {"users": ["a"], "user_data": {"a": {"x": [[0.0] * 9], "y": [1]}}},
    ],
)
def test_femnist_of_another_form_is_an_error(content: object, tmp_path: Path) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "a.json").write_text(json.dumps(content))
    with pytest.raises(InvalidData, match="LEAF"):
        load_images(tmp_path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "starts with nothing"),
        (b"\x89PNG....", "an IDX file"),
        (idx(numpy.zeros((2, 3), numpy.uint8), 8)[:-1], r"needed: 18 for the shape \[2, 3\]"),
        (gzip.compress(idx(numpy.zeros((2, 3), numpy.uint8), 8), mtime=0)[:-5], "truncated"),
    ],
)
def test_idx_that_cannot_be_read(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(content)
    with pytest.raises(InvalidData, match=message):
        read_idx(tmp_path / "a")


@pytest.mark.parametrize(("code", "kind"), [(8, "u1"), (9, "i1"), (11, "i2"), (12, "i4"), (13, "f4"), (14, "f8")])
def test_idx_of_every_type(code: int, kind: str, tmp_path: Path) -> None:
    array = numpy.arange(6).reshape(2, 3).astype(kind)
    (tmp_path / "a").write_bytes(idx(array, code))
    read = read_idx(tmp_path / "a")
    assert read.dtype == array.dtype
    assert numpy.array_equal(read, array)


def test_writers_without_images_or_of_other_images(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="holds no images"):
        load_images(qmnist(tmp_path / "writers"))
    folder = mnist(qmnist(tmp_path / "other"))
    labels = folder / "train-labels-idx1-ubyte.gz"
    labels.write_bytes(gzip.compress(idx(numpy.ones(6, numpy.uint8), 8)))
    with pytest.raises(InvalidData, match="4 train labels of QMNIST differ"):
        load_images(folder)
    labels.write_bytes(gzip.compress(idx(numpy.ones(5, numpy.uint8), 8)))
    with pytest.raises(InvalidData, match="5 labels"):
        load_images(folder)
    labels.unlink()
    assert torch.equal(load_images(folder).train.labels, torch.arange(6) % 3)


def test_images_and_interactions_are_not_mistaken_for_each_other(tmp_path: Path) -> None:
    with pytest.raises(InvalidData, match="holds images"):
        load(mnist(tmp_path / "mnist"))
    (tmp_path / "own.csv").write_text("user,item\n1,2\n")
    with pytest.raises(InvalidData, match="holds interactions"):
        load_images(tmp_path / "own.csv")
