"""Data sets that no rule was made on, through ``fairfold train --data FILE`` and nothing else.

    python benchmarks/recommender_unseen.py --out DIR                       # all of them, one after another
    python benchmarks/recommender_unseen.py book-crossing-liked --out DIR   # one
    python benchmarks/recommender_unseen.py --out DIR --processes 8
    python benchmarks/recommender_unseen.py --out OTHER --set subspace.uploads=all

They are cut out of public sets (FAIRFOLD_DATA may name the folder that holds these): what was liked, what was read,
the last weeks, a third of the items, a part of the users; and some that are hostile: histories of two or three items,
fifty users, three hundred with 800 items each, 200,000 users of an invented world. Printed, and written to DIR: how
well the models of 1x and 16x serve everybody beside EASE and iALS of the same items, in per cent to EASE, and processor
seconds with all references.
"""

import argparse
import csv
import json
import os
import random
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from fairfold.data.download import resolve

Pairs = list[tuple[str, str]]

REFERENCES = ("EASE", "iALS")
TIMED = """
import atexit, resource
used = lambda: resource.getrusage(resource.RUSAGE_SELF)
atexit.register(lambda: print(f"{used().ru_utime:.0f} s, {used().ru_maxrss / 2**20:.1f} GB"))
from fairfold.cli import app
app()
"""


def metric_lines(name: str, *files: str) -> Iterable[list[str]]:
    """Fields of the files of a public set, whatever stands between them."""
    for file in files:
        text = (resolve(name) / file).read_text(encoding="latin-1")
        between = next(mark for mark in (";", "\t", ",", " ") if mark in text[:200])
        yield from csv.reader(text.splitlines(), delimiter=between)


def with_many(pairs: Iterable[tuple[str, str]], least: int) -> Pairs:
    """Of users who have so many."""
    kept = list(dict.fromkeys(pairs))
    many = Counter(user for user, _ in kept)
    return [pair for pair in kept if many[pair[0]] >= least]


def movies() -> list[list[str]]:
    return list(metric_lines("ml-1m", "ml-1m.train.rating", "ml-1m.test.rating"))


def liked_movies() -> Pairs:
    return with_many(((line[0], line[1]) for line in movies() if float(line[2]) >= 4), 5)


def late_movies() -> Pairs:
    """The last tenth of all ratings."""
    lines = movies()
    since = sorted(int(line[3]) for line in lines)[9 * len(lines) // 10]
    return with_many(((line[0], line[1]) for line in lines if int(line[3]) >= since), 5)


def some_movies() -> Pairs:
    lines = movies()
    items = sorted({line[1] for line in lines})
    kept = set(random.Random(0).sample(items, len(items) // 3))
    return with_many(((line[0], line[1]) for line in lines if line[1] in kept), 3)


def long_histories() -> Pairs:
    pairs = [(line[0], line[1]) for line in movies()]
    longest = {user for user, _ in Counter(user for user, _ in pairs).most_common(300)}
    return [pair for pair in pairs if pair[0] in longest]


def fifty_users() -> Pairs:
    pairs = [(line[0], line[1]) for line in movies()]
    some = set(sorted({user for user, _ in pairs})[1000:1050])
    return [pair for pair in pairs if pair[0] in some]


def liked_books() -> Pairs:
    rows = metric_lines("book-crossing", "BX-Book-Ratings.csv")
    return with_many(((row[0], row[1]) for row in rows if row[2].isdecimal() and int(row[2]) >= 7), 5)


def read_books() -> Pairs:
    rows = metric_lines("goodreads-interactions-200k", "goodreads_interactions.csv")
    return with_many(((row[0], row[1]) for row in rows if row[2] == "1"), 1)


def places() -> Pairs:
    """Of 10,000 users."""
    rows = metric_lines("gowalla", "train.txt", "valid.txt", "test.txt")
    return [(row[0], item) for row in rows if 5_000 <= int(row[0]) < 15_000 for item in row[1:] if item]


def short_histories() -> Pairs:
    """Two or three places of each."""
    chance, mine = random.Random(0), defaultdict[str, list[str]](list)
    for user, item in places():
        mine[user].append(item)
    return [(user, item) for user, items in mine.items() for item in chance.sample(items, chance.choice((2, 3)))]


def shortened(pairs: Iterable[tuple[str, str]], lengths: tuple[int, ...], seed: int) -> Pairs:
    """A few items of each user, by chance."""
    chance, mine = random.Random(seed), defaultdict[str, list[str]](list)
    for user, item in pairs:
        mine[user].append(item)
    return [(user, one) for user, of in mine.items() for one in chance.sample(of, min(len(of), chance.choice(lengths)))]


def more_places(first: int, end: int) -> Pairs:
    rows = metric_lines("gowalla", "train.txt", "valid.txt", "test.txt")
    return [(row[0], item) for row in rows if first <= int(row[0]) < end for item in row[1:] if item]


def few_places() -> Pairs:
    return shortened(more_places(0, 5_000), (2, 3, 4), 11)


def few_movies() -> Pairs:
    return shortened(((line[0], line[1]) for line in movies()), (2, 3), 12)


def unrated_books() -> Pairs:
    """Of users who have five or more."""
    rows = metric_lines("book-crossing", "BX-Book-Ratings.csv")
    return with_many(((row[0], row[1]) for row in rows if row[2] == "0"), 5)


def few_books() -> Pairs:
    """Of users who have no more than four."""
    rows = list(metric_lines("book-crossing", "BX-Book-Ratings.csv"))
    pairs = with_many(((row[0], row[1]) for row in rows if row[2] == "0"), 2)
    many = Counter(user for user, _ in pairs)
    return [pair for pair in pairs if many[pair[0]] <= 4]


def praised_books() -> Pairs:
    rows = metric_lines("goodreads-interactions-200k", "goodreads_interactions.csv")
    return with_many(((row[0], row[1]) for row in rows if row[3] in ("4", "5")), 3)


def hundred_liked() -> Pairs:
    """MovieLens 100K, rated 4 or more."""
    return with_many(((line[0], line[1]) for line in metric_lines("ml-100k", "u.data") if int(line[2]) >= 4), 5)


def tagged(lengths: tuple[int, int], seed: int) -> Pairs:
    """8,000 users who like four of sixty tags, and 4,000 items of three tags each."""
    chance, pairs, with_tag = random.Random(seed), dict[tuple[str, str], None](), defaultdict[int, list[int]](list)
    for item in range(4_000):
        for tag in chance.sample(range(60), 3):
            with_tag[tag].append(item)
    for user in range(8_000):
        likes = chance.sample(range(60), 4)
        for _ in range(chance.randint(*lengths)):
            among = with_tag[chance.choice(likes)] if chance.random() < 0.8 else range(4_000)
            pairs[str(user), str(among[int(len(among) * chance.random() ** 2.5)])] = None
    return list(pairs)


def many_users() -> Pairs:
    """200,000 users of 3 to 20 items, popular by a power law; some of one of fifty kinds."""
    chance, pairs = random.Random(0), dict[tuple[str, str], None]()
    for user in range(200_000):
        kind = chance.randrange(50)
        for _ in range(chance.randint(3, 20)):
            item = int(20_000 * chance.random() ** 3)
            item = item // 50 * 50 + kind if chance.random() < 0.6 else item
            pairs[str(user), str(item)] = None
    return list(pairs)


SETS: dict[str, Callable[[], Pairs]] = {
    "movies-liked": liked_movies,
    "movies-late": late_movies,
    "movies-some": some_movies,
    "books-liked": liked_books,
    "books-read": read_books,
    "places": places,
    "short": short_histories,
    "long": long_histories,
    "fifty": fifty_users,
    "many": many_users,
    "places-few": few_places,
    "places-late": partial(more_places, 20_000, 26_000),
    "movies-few": few_movies,
    "books-few": few_books,
    "books-unrated": unrated_books,
    "books-praised": praised_books,
    "hundred-liked": hundred_liked,
    "tags": partial(tagged, (4, 20), 7),
    "tags-few": partial(tagged, (2, 4), 8),
}


def run(name: str, folder: Path, changed: list[str]) -> str:
    """One set: its row of the table."""
    file, out = folder / f"{name}.csv", folder / name
    if not file.exists():
        pairs = SETS[name]()
        file.write_text("user,item\n" + "".join(f"{user},{item}\n" for user, item in pairs))
    if not (out / "result.json").exists():
        command = [sys.executable, "-c", TIMED, "train", "--data", str(file), "--out", str(out)]
        command += [word for one in changed for word in ("--set", one)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "150"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        (folder / f"{name}.txt").write_text(done.stdout + done.stderr)
        if done.returncode:
            return f"| {name} | {' '.join((done.stdout + done.stderr)[-400:].split())} |"
    result, log = json.loads((out / "result.json").read_text()), (folder / f"{name}.txt").read_text()
    first = {kind: next(row for row in result["server"]["baselines"] if row.startswith(kind)) for kind in REFERENCES}
    found = [result["server"]["baselines"][row] for row in first.values()]
    error = result["server"]["differences"][first[REFERENCES[0]]][1]
    sizes = {group["capacity"]: group["everybody"] for group in result["groups"]}
    mine = [f"{sizes[size]:.4f} ({sizes[size] / found[0] - 1:+.1%})" for size in ("1x", "16x")]
    users = len({line.partition(",")[0] for line in file.read_text().splitlines()[1:]})
    cells = [name, f"{users:,}", *(f"{value:.4f}" for value in found), *mine, f"{error / found[0]:.1%}"]
    return f"| {' | '.join(cells)} | {log.splitlines()[-1]} |"


def main() -> None:
    """See the top of this file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sets", nargs="*", default=list(SETS))
    parser.add_argument("--out", type=Path, default=Path("unseen"))
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--set", action="append", default=[], dest="changed", metavar="KEY=VALUE")
    chosen = parser.parse_args()
    chosen.out.mkdir(parents=True, exist_ok=True)
    print("| set | users | EASE | iALS | 1x | 16x | standard error | processor time, peak |\n" + "|---" * 8 + "|")
    with ThreadPoolExecutor(chosen.processes) as pool:
        for row in pool.map(partial(run, folder=chosen.out, changed=chosen.changed), chosen.sets):
            print(row, flush=True)


if __name__ == "__main__":
    main()
