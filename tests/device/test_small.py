"""The small device stays small: what it imports, and its parts against numpy, Flower and torch."""

import random
import subprocess
import sys
from array import array

import numpy
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from benchmarks.device_memory import disk
from fairfold.algorithms.cooccurrence import tuning
from fairfold.device import uploads
from fairfold.device.protobuf import parse_config, parse_fields
from fairfold.device.records import pack_records, parse_records, parse_vector
from fairfold.errors import InvalidMessage

HEAVY = ("torch", "flwr", "numpy", "pydantic")
PROGRAM = f"""
import sys, fairfold.device.exchange, fairfold.device.tasks
heavy = [name for name in {HEAVY} if name in sys.modules]
peak = next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(heavy, peak)
"""


def test_it_imports_nothing_heavy() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    heavy, _, kilobytes = done.stdout.strip().rpartition(" ")
    assert heavy == "[]"
    assert int(kilobytes) < 40_000


IDLE = """
import sys, fairfold.flower.fleet.node_loop
print(next(line.split()[1] for line in open("/proc/self/smaps_rollup") if line.startswith("Pss:")))
"""
DISK = """
import sys, pathlib, fairfold.flower.fleet.node_loop, fairfold.device.tasks, fairfold.privacy.secure.folder
files = {one.__file__ for one in list(sys.modules.values()) if getattr(one, "__file__", None)}
beside = {pathlib.Path(one) for one in files if "site-packages" in one or "fairfold" in one}
print(sorted({one.parent.name for one in beside}), sum(one.stat().st_size for one in beside))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")
def test_an_idle_node_shares_little() -> None:
    done = subprocess.run([sys.executable, "-c", IDLE], capture_output=True, text=True, check=True)
    assert 1024 * int(done.stdout) <= 25_000_000


def test_a_device_needs_little_disk_beside_python() -> None:
    """What it imports, and what pip installs for it; cryptography alone, with OpenSSL in its library, has 15.0 MB."""
    done = subprocess.run([sys.executable, "-c", DISK], capture_output=True, text=True, check=True)
    assert int(done.stdout.split()[-1]) <= 15_600_000
    assert disk() <= 16_800_000


def test_records_are_flower_s_byte_for_byte() -> None:
    facts = {"version": 10, "minus": -3, "yes": True, "weight": 2.5, "name": "a", "scales": [1.0, 0.5], "none": []}
    vectors = {"b": array("f", [1, 2, 3]), "a": array("q", [7]), "empty": array("d")}
    theirs = RecordDict({"arrays": ArrayRecord({name: Array(numpy.array(of)) for name, of in vectors.items()})})
    theirs["fairfold"] = ConfigRecord(facts)  # type: ignore[arg-type]
    objects: dict[str, bytes] = {}
    packed = pack_records({"arrays": vectors, "fairfold": facts}, objects)
    assert packed.object_id == theirs.object_id
    assert parse_records(packed.object_id, objects) == {"arrays": vectors, "fairfold": facts}


@pytest.mark.parametrize("seed", range(20))
def test_the_held_out_tenth_is_the_worker_s(seed: int) -> None:
    draw = random.Random(seed)
    items = sorted(draw.sample(range(100_000), draw.randint(1, 60)))
    mask = tuning.training_mask(torch.tensor(items), torch.tensor([len(items)]))
    assert uploads.held_out_items(items) == set(torch.tensor(items)[~mask].tolist())


def test_what_is_no_message_is_refused() -> None:
    draw = random.Random(0)
    for _ in range(2_000):
        content = draw.randbytes(draw.randint(0, 40))
        for parse in (parse_fields, parse_config, lambda content: parse_vector(content, "float32", 2)):
            try:
                parse(content)
            except (InvalidMessage, ValueError, LookupError, TypeError):
                continue


def test_a_vector_has_its_agreed_size() -> None:
    data = Array(numpy.zeros(3, numpy.float32)).data
    assert parse_vector(data, "float32", 3).tolist() == [0.0, 0.0, 0.0]
    for dtype, size in (("float32", 2), ("float64", 3), ("object", 3)):
        with pytest.raises(InvalidMessage):
            parse_vector(data, dtype, size)
