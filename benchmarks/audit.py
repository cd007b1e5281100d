"""All attacks of the table in docs/privacy.md, on runs of several algorithms, data sets and levels.

    FAIRFOLD_DATA=... python benchmarks/privacy/audit.py [--users 100] [--jobs 2] [--only private] > audit.csv

A line per attack, as `fairfold audit` measures it on a run of these settings: what was seen, what was tried, its value
with the 95 % interval over users, and seconds of processor time for all attacks on what was seen.
"""

import argparse
import csv
import multiprocessing
import sys
import time
from typing import Any

import torch

from fairfold.config import Settings
from fairfold.config.files import load_settings
from fairfold.federation.federation import load_interactions
from fairfold.privacy.audit.auditor import Auditor, View

MIXED = "1x-4x-16x-64x"
RECIPES = {"co_occurrence": "default"}
PRIVATE = {"privacy.level": "private", "privacy.epsilon": 8.0}
BARE = {"algorithm.min_item_users": 0}

Row = tuple[str, str, str, int, dict[str, Any]]
"""Data, algorithm, capacities, devices of a sum (1: one update, 0: the run's own), and changes."""

HEADINGS = ("data", "algorithm", "capacities", "changes", "seen", "attack", "devices", "value", "low", "high", "users",
            "note", "seconds")  # fmt: skip

COHORTS = (5, 20, 100)
ROWS: list[Row] = [
    *[(data, "co_occurrence", "1x", 0, PRIVATE) for data in ("ml-100k", "ml-1m")],
    *[("ml-100k", "co_occurrence", "1x", cohort, more) for more in ({}, BARE) for cohort in (*COHORTS, 943)],
    ("ml-1m", "co_occurrence", "1x", 100, {}),
    *[("ml-100k", "co_occurrence", "1x", 100, {"algorithm.tune": False} | more) for more in ({}, BARE)],
    *[
        (data, "co_occurrence", MIXED, cohort, more)
        for data in ("ml-100k", "ml-1m")
        for more in ({}, BARE)
        for cohort in COHORTS
    ],
    *[("ml-1m", kind, MIXED, cohort, {}) for kind in ("gradient", "closed_form") for cohort in COHORTS],
    *[(data, "co_occurrence", MIXED, 1, {}) for data in ("ml-100k", "ml-1m")],
    *[("ml-1m", kind, MIXED, 1, {}) for kind in ("gradient", "closed_form")],
]


def view_of(auditor: Auditor, cohort: int) -> View:
    """What is seen: of the run's own server, of one update, or of sums of so many."""
    if cohort == 0:
        return auditor.views(compare=False)[0]
    if cohort == 1:
        return View("one update", auditor.settings.with_changes({"privacy.level": "plain"}), 1, own=False)
    return View(f"the sum of {cohort}", auditor.at("secure", cohort), cohort, own=False)


def settings_of(data: str, kind: str, capacities: str, changes: dict[str, Any]) -> Settings:
    """Those of `fairfold train` with the recipe of the algorithm; of one that has none with its defaults."""
    known = {"data.name": data, "algorithm.kind": kind, "fleet.capacities": capacities} | changes
    return load_settings(None, known, RECIPES.get(kind))


def attacked(job: tuple[Row, int]) -> list[list[Any]]:
    """Lines of a row."""
    (data, kind, capacities, cohort, changes), users = job
    torch.set_num_threads(1)
    started = time.process_time()
    settings = settings_of(data, kind, capacities, changes)
    auditor = Auditor(settings, load_interactions(settings)[0], users)
    view = view_of(auditor, cohort)
    found = auditor.attack(view)
    seconds = time.process_time() - started
    known = [data, kind, capacities, " ".join(f"{key}={value}" for key, value in changes.items())]
    return [
        [*known, view.name, one.attack, one.group, f"{one.value:.4g}", f"{one.low:.4g}", f"{one.high:.4g}", one.users,
         one.note, f"{seconds:.0f}"]
        for one in found
    ]  # fmt: skip


def main() -> None:
    """Write a table to standard output."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--users", type=int, default=100)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--only", default="", help="Rows in which this word stands.")
    chosen = parser.parse_args()
    out = csv.writer(sys.stdout)
    out.writerow(HEADINGS)
    jobs = [(row, chosen.users) for row in ROWS if chosen.only in str(row)]
    with multiprocessing.get_context("spawn").Pool(chosen.jobs, maxtasksperchild=1) as pool:
        for lines in pool.imap_unordered(attacked, jobs):
            out.writerows(lines)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
