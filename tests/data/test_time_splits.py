"""Splits by time: the newest interactions are held out, whatever form times are written in."""

import csv
import datetime
import json
import random
from collections.abc import Callable
from pathlib import Path

import polars
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fairfold
from fairfold.data import Dataset, load
from fairfold.data.parsing import as_times
from fairfold.data.preparing import prepare
from fairfold.errors import InvalidData

ROWS = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=40)
START = datetime.datetime(2021, 3, 28, 0, 30, tzinfo=datetime.UTC)


def named(data: Dataset, user: int, *, test: bool) -> set[int]:
    assert data.user_ids is not None
    assert data.item_ids is not None
    if str(user) not in data.user_ids:
        return set()
    part = data.test if test else data.train
    return {int(data.item_ids[item]) for item in part.of(data.user_ids.index(str(user))).tolist()}


def write(path: Path, rows: list[tuple[int, int, str]], separator: str = ",", *, header: bool = True) -> Path:
    with path.open("w", newline="") as file:
        lines = csv.writer(file, delimiter=separator)
        lines.writerows([("user", "item", "timestamp")] if header else [])
        lines.writerows(rows)
    return path


@given(rows=ROWS)
@settings(deadline=None, max_examples=25)
def test_what_is_held_out_is_newest(tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, int]]) -> None:
    folder = tmp_path_factory.mktemp("newest")
    path = write(folder / "own.csv", [(user, item, str(time)) for user, item, time in rows])
    newest, share = (load(path, cache=folder, split=split) for split in ("newest", "newest-share"))
    for user in range(4):
        last: dict[int, tuple[int, int]] = {}  # when each item was last had, and in which row
        for place, (_, item, time) in enumerate(row for row in rows if row[0] == user):
            last[item] = max(last.get(item, (-1, -1)), (time, place))
        order = sorted(last, key=last.__getitem__)
        kept = max(1, len(order) - 1)
        assert (named(newest, user, test=False), named(newest, user, test=True)) == ({*order[:kept]}, {*order[kept:]})
        kept = max(1, int(0.7 * len(order) + 0.5))
        assert (named(share, user, test=False), named(share, user, test=True)) == ({*order[:kept]}, {*order[kept:]})


FORMS: dict[str, Callable[[datetime.datetime], str]] = {
    "seconds": lambda time: str(int(time.timestamp())),
    "milliseconds": lambda time: str(int(time.timestamp() * 1000)),
    "a number with a point": lambda time: f"{time.timestamp():.3f}",
    "ISO": lambda time: time.strftime("%Y-%m-%dT%H:%M:%S"),
    "ISO in UTC": lambda time: time.strftime("%Y-%m-%dT%H:%M:%SZ"),
    "a zone that changes": lambda time: time.astimezone(
        datetime.timezone(datetime.timedelta(hours=1 + time.minute // 40))
    ).isoformat(),
    "a date and a time": lambda time: time.strftime("%Y-%m-%d %H:%M:%S.%f"),
    "minutes": lambda time: time.strftime("%Y-%m-%d %H:%M"),
    "Goodreads": lambda time: time.strftime("%a %b %d %H:%M:%S %z %Y"),
}


@pytest.mark.parametrize("form", FORMS)
def test_any_usual_form_of_a_time_gives_the_same_order(tmp_path: Path, form: str) -> None:
    times = [START + datetime.timedelta(minutes=47 * step) for step in range(40)]
    random.Random(2).shuffle(times)
    found = as_times(polars.Series([FORMS[form](time) for time in times]))
    assert found.arg_sort().to_list() == polars.Series([time.timestamp() for time in times]).arg_sort().to_list()
    rows = [(1, item, FORMS[form](time)) for item, time in enumerate(times)]
    data = load(write(tmp_path / "own.csv", rows), split="newest")
    assert named(data, 1, test=True) == {max(range(40), key=times.__getitem__)}


def test_forms_of_files_tell_their_times(tmp_path: Path) -> None:
    rows = [(user, item, 1 + (7 * item + user) % 5, 100 - 3 * ((item * 5 + user) % 11))
            for user in range(1, 4) for item in range(1, 12)]  # fmt: skip
    newest = {
        user: max((row for row in rows if row[0] == user), key=lambda row: (row[3], row[1]))[1] for user in (1, 2)
    }
    lines = {"u.data": "\t", "ratings.dat": "::", "own.csv": ",", "own.inter": "\t", "amazon.csv": ","}
    heads = {"own.csv": "userId,movieId,rating,timestamp\n"}
    heads["own.inter"] = "user_id:token\titem_id:token\trating:float\ttimestamp:float\n"
    for name, separator in lines.items():
        text = [separator.join(map(str, row)) for row in rows]
        if name == "amazon.csv":
            text = [f"A{user:09},B{item:09},{rating}.0,{time}" for user, item, rating, time in rows]
        (tmp_path / name).write_text(heads.get(name, "") + "\n".join(text) + "\n")
    keys = ("user_id", "item_id", "rating", "unixReviewTime")
    records = [dict(zip(keys, row, strict=True)) for row in rows]
    (tmp_path / "own.json").write_text("\n".join(map(json.dumps, records)) + "\n")
    stamps = polars.Series("date", [START + datetime.timedelta(days=row[3]) for row in rows])
    polars.DataFrame(rows, schema=["user", "item", "rating", "date"], orient="row").with_columns(stamps).write_parquet(
        tmp_path / "own.parquet"
    )
    for name in (*lines, "own.json", "own.parquet"):
        data = load(tmp_path / name, split="newest", ratings=True)
        assert data.user_ids is not None
        assert data.item_ids is not None
        for user, item in newest.items():
            found = data.test.of(next(place for place, one in enumerate(data.user_ids) if int(one.lstrip("A")) == user))
            assert [int(data.item_ids[one].lstrip("B")) for one in found.tolist()] == [item], name


def test_it_is_said_whether_times_are_used(tmp_path: Path) -> None:
    timed = write(tmp_path / "timed.csv", [(1, item, str(item)) for item in range(5)])
    (tmp_path / "plain.csv").write_text("user,item\n1,2\n1,3\n")
    words = prepare(timed).manifest["split"]
    assert "'timestamp'" not in words
    assert words.endswith("the times in column 3 are not used (split = 'newest' would)")
    assert prepare(timed, split="newest").manifest["split"].endswith("held out, by the times in column 3")
    assert "times" not in prepare(tmp_path / "plain.csv").manifest["split"]
    with pytest.raises(InvalidData, match=r"no times.*--time-column"):
        prepare(tmp_path / "plain.csv", split="newest")
    with pytest.raises(InvalidData, match="no column 'when'"):
        prepare(timed, split="newest", time_column="when")
    with pytest.raises(InvalidData, match="newest-share"):
        prepare(timed, split="oldest")


def test_times_that_cannot_be_read_are_counted_or_refused(tmp_path: Path) -> None:
    rows = [(1, item, str(100 + item)) for item in range(30)]
    few = [*rows[:28], (1, 28, "soon"), (1, 29, "")]
    found = prepare(write(tmp_path / "few.csv", few), split="newest")
    assert found.manifest["repairs"]["times that cannot be read, taken as the oldest"] == 2
    assert named(load(tmp_path / "few.csv", split="newest"), 1, test=True) == {27}
    assert "times that" not in str(prepare(tmp_path / "few.csv").manifest["repairs"])
    with pytest.raises(InvalidData, match=r"5 of 30 times of many.csv cannot be read"):
        prepare(
            write(tmp_path / "many.csv", [*rows[:25], *((1, item, "nan") for item in range(25, 30))]), split="newest"
        )


def test_tables_in_memory_are_split_by_time() -> None:
    when = [START + datetime.timedelta(hours=(item * 7) % 12) for item in range(12)] * 3
    frame = polars.DataFrame({"user": [user for user in range(3) for _ in range(12)], "item": [*range(12)] * 3})
    fit = fairfold.fit(frame.with_columns(polars.Series("seen", when)), split="newest", time_column="seen",
                       capacities="1x", rounds=1, progress=False)  # fmt: skip
    last = max(range(12), key=when.__getitem__)
    assert all(named(fit.data, user, test=True) == {last} for user in range(3))


def test_validation_comes_before_the_test_in_time(tmp_path: Path) -> None:
    rows = [(1, item, str((item * 7) % 20)) for item in range(20)]
    data = load(write(tmp_path / "own.csv", rows), split="newest-share", valid=0.5)
    order = sorted(range(20), key=lambda item: (item * 7) % 20)
    assert data.valid is not None
    assert data.item_ids is not None
    assert {int(data.item_ids[item]) for item in data.valid.of(0).tolist()} == {*order[7:14]}
    assert (named(data, 1, test=False), named(data, 1, test=True)) == ({*order[:7]}, {*order[14:]})
