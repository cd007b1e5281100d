"""A record as a row of CSV, with a checksum of its own: what anybody's tool can open, and what is believed when read.

Texts and numbers of a cell have columns; what is of several parts (settings, curve, facts, users) is JSON in one. A row
is a line, whatever is in it, so that one that is damaged costs no other.
"""

import csv
import io
import json
from typing import Any

from fairfold.sealed import LARGEST, Damaged, line_in, sealed_line, table_in

LABELS = "label", "table", "row", "column"
MADE_BY = "kind", "fairfold", "torch", "commit"
NUMBERS = "best", "best_round", "last", "last_round", "seconds"
PARTS = "curve", "facts", "data", "by_user"

COLUMNS = (*LABELS, "seed", "state", *NUMBERS, "reason", *PARTS, "settings", *MADE_BY, "fingerprint")
HEADER = ",".join([*COLUMNS, "checksum"])

_JSON = {"seed", *NUMBERS, "reason", *PARTS, "settings"}
_EMPTY: dict[str, Any] = {"reason": "", "curve": [], "facts": {}, "data": {}, "by_user": {}}
_NOTHING: list[Any] = [None, "", [], (), {}]


def row_of(record: dict[str, Any]) -> str:
    """A record as a line, with its end."""
    told = record | record["outcome"]
    cells = ["" if (of := told.get(name)) in _NOTHING else json.dumps(of) if name in _JSON else of for name in COLUMNS]
    text = io.StringIO()
    csv.writer(text, lineterminator="").writerow(cells)
    return sealed_line(text.getvalue(), ",")


def record_in(line: bytes) -> dict[str, Any]:
    """The record of such a line, given without its end; :class:`~fairfold.sealed.Damaged` where it is another."""
    text = line_in(line, ",")
    if text is None:
        raise Damaged("another checksum than it says, or none")
    usual = csv.field_size_limit(LARGEST)  # what every user of a large data set got is one text
    try:
        cells = next(csv.reader([text]))
    finally:
        csv.field_size_limit(usual)
    told = dict(zip(COLUMNS, cells, strict=True))
    read = table_in("{" + ",".join(f'"{name}":{told[name]}' for name in COLUMNS if name in _JSON and told[name]) + "}")
    outcome = {"state": told["state"]} | {name: read.get(name, _EMPTY.get(name)) for name in (*NUMBERS, *_EMPTY)}
    made = {"commit": told["commit"] or None} | {name: told[name] for name in MADE_BY if told[name]}
    asked = {"settings": read.get("settings", {})} | ({"seed": read["seed"]} if "seed" in read else {})
    return {name: told[name] for name in (*LABELS, "fingerprint")} | made | asked | {"outcome": outcome}
