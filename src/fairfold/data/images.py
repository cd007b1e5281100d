"""Read images with labels and writers: IDX files (MNIST, QMNIST) and LEAF's FEMNIST."""

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import torch
from numpy.typing import NDArray
from torch import Tensor

from fairfold.data.files import pieces, unreadable
from fairfold.data.interactions import sha256_of
from fairfold.errors import InvalidData

# Third byte of an IDX file: the type of its elements, stored with the high byte first.
_IDX_TYPES = {0x08: ">u1", 0x09: ">i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
QMNIST_WRITER = 2  # column of the NIST writer in QMNIST's extended labels; column 0 is the digit
FEMNIST_SIDE = 28
Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any] | None]  # images, labels and writers of a split
MAX_DIMENSIONS = 8
MAX_CLASSES = 1 << 16
PIECE = 1 << 20


@dataclass(frozen=True)
class Images:
    """Images of one split."""

    images: Tensor  # uint8 [images, height, width], 0 is black
    labels: Tensor  # int64 [images]
    writers: Tensor | None = None  # int64 [images], dense over both splits; None where they are not known

    def __len__(self) -> int:
        return int(self.labels.numel())

    def at(self, rows: Tensor) -> "Images":
        """The images of some rows, with their labels and writers."""
        return Images(self.images[rows], self.labels[rows], None if self.writers is None else self.writers[rows])


@dataclass(frozen=True)
class ImageDataset:
    """Images to train on and to test on, with the original ids of the writers."""

    name: str
    train: Images
    test: Images
    num_classes: int
    writer_ids: list[str] | None = field(default=None, repr=False)

    def counts(self) -> dict[str, int]:
        """Numbers of images, classes and, where they are known, writers."""
        counts = {"train": len(self.train), "test": len(self.test), "classes": self.num_classes}
        writers = {"train_writers": self.train.writers, "test_writers": self.test.writers}
        return counts | {name: len(numpy.unique(ids.numpy())) for name, ids in writers.items() if ids is not None}

    def fingerprint(self) -> dict[str, Any]:
        """Name, counts and checksum, by which a run recognizes the data it belongs to."""
        tensors = [tensor for part in (self.train, self.test) for tensor in (part.images, part.labels, part.writers)]
        return {"name": self.name, **self.counts(), "sha256": sha256_of(tensors)}


def read_idx(path: Path) -> NDArray[Any]:
    """Read an IDX file, gzip or not; no more is read than its header asks for."""
    content = bytearray()
    stream = pieces(path, PIECE)

    def read(wanted: int) -> None:
        while len(content) < wanted and (piece := next(stream, b"")):
            content.extend(piece)

    read(4)
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] not in _IDX_TYPES or content[3] > MAX_DIMENSIONS:
        given = f"{path.name} starts with {content[:4].hex(' ') or 'nothing'}"
        raise _damaged_file(
            given, f"an IDX file: two zero bytes, a type, a number of dimensions up to {MAX_DIMENSIONS}"
        )
    dtype = numpy.dtype(_IDX_TYPES[content[2]])
    dimensions = content[3]
    start = 4 + 4 * dimensions
    read(start)
    known = len(content[4:start]) // 4
    shape = struct.unpack(f">{known}I", content[4 : 4 + 4 * known])
    needed = start + math.prod(shape) * dtype.itemsize
    read(needed + 1)
    if len(shape) != dimensions or len(content) != needed:
        given = f"{path.name} has {len(content):,} bytes{' or more' if len(content) > needed else ''}"
        raise _damaged_file(given, f"{needed:,} for the shape {list(shape)} in its header")
    return numpy.frombuffer(content, dtype, offset=start).reshape(shape).astype(dtype.newbyteorder("="))


def source_files(folder: Path, images: Path | None = None) -> list[Path]:
    """List the files that :func:`read_images` reads."""
    if any(folder.glob("train/*.json")):
        return sorted(folder.glob("train/*.json")) + sorted(folder.glob("test/*.json"))
    folders = dict.fromkeys((folder, _image_folder(folder, images)))  # they may be the same
    return [file for one in folders for file in sorted(one.glob("*-idx[123]-*"))]


def read_images(folder: Path, images: Path | None = None) -> ImageDataset:
    """Read MNIST, LEAF's FEMNIST, or QMNIST's extended labels with MNIST's ``images`` (by default beside them)."""
    if any(folder.glob("train/*.json")):
        return _read_femnist(folder)
    image_folder = _image_folder(folder, images)
    train, test = (_read_split(folder, image_folder, split) for split in ("train", "test"))
    writer_ids: list[str] | None = None
    if train[2] is not None and test[2] is not None:
        known, numbers = numpy.unique(numpy.concatenate([train[2], test[2]]), return_inverse=True)
        writer_ids = list(map(str, known))
        num_train = len(train[2])
        train, test = (*train[:2], numbers[:num_train]), (*test[:2], numbers[num_train:])
    shapes = [list(pixels.shape[1:]) for pixels, *_ in (train, test)]
    if shapes[0] != shapes[1]:
        given = f"images of {shapes[0]} to train on and of {shapes[1]} to test"
        raise InvalidData(given, "images of one size", "Take both from one data set.")
    return _make_dataset(folder, train, test, writer_ids)


def _make_dataset(folder: Path, train: Arrays, test: Arrays, writer_ids: list[str] | None) -> ImageDataset:
    classes = int(max(train[1].max(), test[1].max())) + 1
    return ImageDataset(folder.resolve().name, _to_images(*train), _to_images(*test), classes, writer_ids)


def _to_images(images: NDArray[Any], labels: NDArray[Any], writers: NDArray[Any] | None) -> Images:
    return Images(
        torch.from_numpy(numpy.ascontiguousarray(images, dtype=numpy.uint8)),
        torch.from_numpy(labels.astype(numpy.int64)),
        None if writers is None else torch.from_numpy(writers.astype(numpy.int64)),
    )


def _find_first(folder: Path, *patterns: str) -> Path | None:
    return next((path for pattern in patterns for path in sorted(folder.glob(pattern))), None)


def _image_folder(folder: Path, images: Path | None) -> Path:
    for candidate in (folder, *([images] if images else []), folder.resolve().parent / "mnist"):
        if _find_first(candidate, "*train-images-idx3-*") is not None:
            return candidate
    needed = "train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and their t10k- counterparts"
    remedy = "Name the folder of the MNIST images with --images, or put it beside this one under the name mnist."
    raise InvalidData(f"{folder} holds no images", needed, remedy)


def _read_split(folder: Path, image_folder: Path, split: str) -> Arrays:
    prefix = "train" if split == "train" else "t10k"
    found = _find_first(image_folder, f"{prefix}-images-idx3-*", f"qmnist-{split}-images-idx3-*")
    extended = _find_first(folder, f"qmnist-{split}-labels-idx2-*")
    plain = _find_first(image_folder, f"{prefix}-labels-idx1-*")
    if found is None or (plain is None and extended is None):
        missing = f"{prefix}-images-idx3-ubyte" if found is None else f"{prefix}-labels-idx1-ubyte"
        raise InvalidData(f"{image_folder} lacks {missing}", "images and labels of train and test", "Add the file.")
    pixels = _read_array(found, 3)
    if pixels.dtype != numpy.uint8 or not pixels.size:
        raise _damaged_file(f"{found.name} holds {pixels.dtype} of shape {list(pixels.shape)}", "images of bytes")
    labels = None if plain is None else _read_array(plain, 1)
    if labels is not None and len(labels) != len(pixels):
        raise _damaged_file(f"{plain} has {len(labels):,} labels", f"{len(pixels):,}, one for every image")
    if extended is None:
        assert labels is not None
        _check_labels(str(plain), labels)
        return pixels, labels, None
    table = _read_array(extended, 2)
    if len(table) < len(pixels) or table.shape[1] <= QMNIST_WRITER:
        given = f"{extended} has {len(table):,} rows and {table.shape[1]} columns"
        raise _damaged_file(given, f"at least {len(pixels):,} and {QMNIST_WRITER + 1}")
    # QMNIST has more test labels than MNIST has images: the first ones are MNIST's, in its order.
    table = table[: len(pixels)]
    labels = table[:, 0] if labels is None else labels
    _check_labels(str(plain or extended), labels)
    if not numpy.array_equal(table[:, 0], labels):
        given = f"{int((table[:, 0] != labels).sum()):,} {split} labels of QMNIST differ from the images' own"
        raise InvalidData(given, "the same images in the same order", "Use the unchanged MNIST files.")
    return pixels, labels, table[:, QMNIST_WRITER]


def _read_array(path: Path, dimensions: int) -> NDArray[Any]:
    array = read_idx(path)
    if array.ndim != dimensions:
        raise _damaged_file(f"{path.name} has the shape {list(array.shape)}", f"{dimensions} dimensions")
    return array


def _damaged_file(given: str, needed: str) -> InvalidData:
    return InvalidData(given, needed, "Download it again.")


def _check_labels(where: str, labels: NDArray[Any]) -> None:
    """Refuse labels out of range: a model has a row for each class."""
    whole = labels.dtype.kind in "iu" and labels.size > 0
    if not whole or not (int(labels.min()) >= 0 and int(labels.max()) < MAX_CLASSES):
        found = f"{labels.dtype}, {f'from {labels.min()} to {labels.max()}' if labels.size else 'none'}"
        needed = f"whole numbers from 0 to {MAX_CLASSES - 1:,}"
        raise InvalidData(f"the labels of {where} are {found}", needed, "Check the files.")


def _read_femnist(folder: Path) -> ImageDataset:
    writers: dict[str, int] = {}
    parts: list[Any] = []
    for split in ("train", "test"):
        files = sorted((folder / split).glob("*.json"))
        pieces = [piece for path in files for piece in _femnist_file(path, writers)]
        if not pieces:
            raise InvalidData(f"no images in {folder / split}", "LEAF's *.json files", "Run LEAF's preprocess.sh.")
        parts.append(tuple(numpy.concatenate(column) for column in zip(*pieces, strict=True)))
    return _make_dataset(folder, parts[0], parts[1], list(writers))


def _femnist_file(path: Path, writers: dict[str, int]) -> list[Arrays]:
    """Read one of LEAF's files: ``{"users": [...], "user_data": {user: {"x", "y"}}}``."""
    pieces: list[Arrays] = []
    try:
        content = json.loads(path.read_bytes())
        for user in content["users"]:
            data = content["user_data"][user]
            if not data["y"]:
                continue
            with numpy.errstate(over="ignore"):  # overflow to infinity is refused below
                pixels = numpy.asarray(data["x"], dtype=numpy.float32)
            pixels = pixels.reshape(len(data["y"]), FEMNIST_SIDE, FEMNIST_SIDE)
            if not (pixels.min() >= 0 and pixels.max() <= 1):
                raise ValueError("pixels outside 0 to 1")
            number = writers.setdefault(user, len(writers))
            labels = numpy.asarray(data["y"])
            if labels.shape != (len(pixels),):
                raise ValueError("labels that are no list of numbers")
            _check_labels(path.name, labels)
            pieces.append((numpy.rint(pixels * 255).astype(numpy.uint8), labels, numpy.full(len(labels), number)))
    except InvalidData:
        raise
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
        given = f"{path.name} cannot be read ({type(error).__name__}: {error})"
        needed = "LEAF's form: users, and user_data with x (784 numbers from 0 to 1 per image) and y for each of them"
        raise InvalidData(given, needed, "Write it again with LEAF's preprocess.sh.") from error
    return pieces
