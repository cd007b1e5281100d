"""Small real data files of every form that is read, and ways to damage them; for ``fuzz_data.py``."""

import gzip
import io
import json
import random
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import polars

Random = random.Random
Files = dict[str, bytes]
"""What a folder holds, by name."""

TOKENS = (
    *(b'"', b'""', b"'", b",", b";", b"\t", b"|", b"::", b" ", b"\n", b"\r", b"\r\n", b"\0", b"\xff\xfe"),
    *(b"\xef\xbb\xbf", b"NaN", b"nan", b"-Infinity", b"inf", b"1e999", b"-0", b"+1", b"007", b"-1", b"", b"null"),
    *(str(2**63).encode(), str(-(2**63) - 1).encode(), b"9" * 40, b"9" * 5000, b"0x10", b"\xc3\x28", b"\xed\xa0\x80"),
    *(b"[" * 3000, b'{"a":' * 3000, b"{}", b"[1]", b'{"a": 1}', b"\\ud800", b"\\", b"PK\x03\x04", b"\x1f\x8b", b"PAR1"),
    *("é".encode(), "\u2028".encode(), "\x85".encode(), b"\x85", "\U0001f600".encode(), b"a" * 70_000),
)
WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF)


def rows(source: Random) -> list[tuple[int, int, int]]:
    return [(source.randrange(9), source.randrange(30), source.randint(1, 5)) for _ in range(source.randint(1, 60))]


def _table(source: Random, separator: str, header: str, end: str = "\n") -> bytes:
    body = [separator.join(map(str, row)) for row in rows(source)]
    return (end.join([*([header.replace(",", separator)] if header else []), *body]) + end).encode()


def _csv(source: Random) -> Files:
    end = source.choice(["\n", "\r\n", "\r"])
    return {"own.csv": _table(source, source.choice([",", ";", "|", "\t"]), "user_id,item_id,rating", end)}


def _movielens(source: Random) -> Files:
    titles = "movieId,title,genres\n" + "".join(f'{item},"Title, {item}",x\n' for item in range(30))
    return {"ratings.csv": _table(source, ",", "userId,movieId,rating"), "movies.csv": titles.encode()}


def _dat(source: Random) -> Files:
    titles = "".join(f"{item}::Title é {item}::x\n" for item in range(30))
    return {"ratings.dat": _table(source, "::", ""), "movies.dat": titles.encode("latin-1")}


def _u_data(source: Random) -> Files:
    return {"u.data": _table(source, "\t", ""), "u.item": b"".join(b"%d|Title|x\n" % item for item in range(30))}


def _books(source: Random) -> Files:
    body = "".join(f'"{user}";"{item:010d}";"{rating}"\n' for user, item, rating in rows(source))
    return {"BX-Book-Ratings.csv": ('"User-ID";"ISBN";"Book-Rating"\n' + body).encode("latin-1")}


def _amazon(source: Random) -> Files:
    body = "".join(f"A{user:012d},B{item:09d},{rating}.0,1390000000\n" for user, item, rating in rows(source))
    return {"ratings_Books.csv": body.encode()}


def _lines(source: Random) -> Files:
    def split() -> bytes:
        made = [[user, *(source.randrange(30) for _ in range(5))] for user in range(6)]
        return "".join(" ".join(map(str, line)) + "\n" for line in made).encode()

    return {"train.txt": split(), "test.txt": split()}


def _json(source: Random) -> Files:
    names = source.choice(
        [("user_id", "book_id", "rating"), ("reviewerID", "asin", "overall"), ("user", "item", "stars")]
    )
    made = [json.dumps(dict(zip(names, row, strict=True)) | {"text": "a, \n “b”"}) for row in rows(source)]
    return {"own.jsonl": ("\n".join(made) + "\n").encode()}


def _parquet(source: Random) -> Files:
    users, items, ratings = zip(*rows(source), strict=True)
    columns = {"user": users, "item": items, "rating": ratings}
    frame = polars.DataFrame(columns).with_columns(
        polars.col("user").cast(source.choice([polars.Int64, polars.UInt32, polars.String, polars.UInt64])),
        polars.col("item").cast(source.choice([polars.Int32, polars.String, polars.Float64])),
        polars.col("rating").cast(source.choice([polars.Float32, polars.Int8, polars.String])),
    )
    file = io.BytesIO()
    frame.write_parquet(file, compression=source.choice(["zstd", "snappy", "gzip", "lz4", "uncompressed"]))
    return {"own.parquet": file.getvalue()}


def _zip(source: Random) -> Files:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", source.choice([zipfile.ZIP_DEFLATED, zipfile.ZIP_STORED])) as packed:
        for name, content in _movielens(source).items():
            packed.writestr(f"set/{name}", content)
    return {"set.zip": file.getvalue()}


def _idx(kind: int, shape: tuple[int, ...], content: bytes) -> bytes:
    return struct.pack(f">HBB{len(shape)}I", 0, kind, len(shape), *shape) + content


def _images(source: Random) -> Files:
    files: Files = {}
    writers = source.random() < 0.5
    for prefix, split in (("train", "train"), ("t10k", "test")):
        count = source.randint(1, 6)
        labels = [source.randrange(10) for _ in range(count)]
        files[f"{prefix}-images-idx3-ubyte"] = _idx(8, (count, 4, 4), source.randbytes(16 * count))
        files[f"{prefix}-labels-idx1-ubyte"] = _idx(8, (count,), bytes(labels))
        if writers:
            table = b"".join(struct.pack(">8i", label, 0, source.randrange(5), 0, 0, 0, 0, 0) for label in labels)
            files[f"qmnist-{split}-labels-idx2-int"] = _idx(12, (count, 8), table)
    return files


def _femnist(source: Random) -> Files:
    def split() -> bytes:
        users = ["f1", "f2"]
        data = {user: {"x": [[round(source.random(), 2)] * 784], "y": [source.randrange(62)]} for user in users}
        return json.dumps({"users": users, "num_samples": [1, 1], "user_data": data}).encode()

    return {"train/a.json": split(), "test/a.json": split()}


FORMS: dict[str, Callable[[Random], Files]] = {
    "csv": _csv,
    "movielens": _movielens,
    "dat": _dat,
    "u.data": _u_data,
    "books": _books,
    "amazon": _amazon,
    "lines": _lines,
    "json": _json,
    "parquet": _parquet,
    "zip": _zip,
    "images": _images,
    "femnist": _femnist,
}
PACKED = {"csv", "json", "lines", "images"}
"""Forms whose files may be gzip."""


def mutate(content: bytes, source: Random) -> bytes:
    """A file with one to four harms done to it."""
    changed = bytearray(content)
    for _ in range(source.randint(1, 4)):
        at = source.randrange(len(changed) + 1)
        stop = min(len(changed), at + source.choice([1, 1, 2, 4, 8, 50, 1000]))
        kind = source.randrange(9)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << source.randrange(8)
        elif kind == 1 and at < len(changed):
            changed[at] = source.randrange(256)
        elif kind == 2:
            changed[at:at] = source.choice(TOKENS)
        elif kind == 3:
            changed[at:stop] = source.choice(TOKENS)
        elif kind == 4:
            del changed[at:stop]
        elif kind == 5:
            changed[at:at] = changed[at:stop] * source.randint(1, 20)
        elif kind == 6 and source.random() < 0.5:
            del changed[at:]
        elif kind == 7:
            word = struct.pack(source.choice(["<I", ">I"]), source.choice(WORDS))
            changed[at : at + 4] = word
        elif kind == 8:
            changed[at:stop] = source.randbytes(stop - at)
    return bytes(changed)


def damaged(form: str, source: Random, folder: Path) -> Path:
    """Write the files of a form, one of them damaged now and then, and return what to read: a folder or a file."""
    files = FORMS[form](source)
    packed = form in PACKED and source.random() < 0.3
    chosen = source.choice(sorted(files))
    if source.random() < 0.02:
        chosen = ""  # nothing is damaged
    for name, content in files.items():
        harmed = mutate(content, source) if name == chosen and (not packed or source.random() < 0.5) else content
        if packed:
            harmed = gzip.compress(harmed, 1)
            if name == chosen and source.random() < 0.5:
                harmed = mutate(harmed, source)
        path = folder / (f"{name}.gz" if packed else name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(harmed)
    if len(files) == 1 and form != "zip":
        return path
    return folder
