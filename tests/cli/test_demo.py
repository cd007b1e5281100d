"""The demonstration: one table, one picture, three recommendations with names."""

import signal
import subprocess
import urllib.request
from pathlib import Path

import pytest

from fairfold.data.synthetic import SyntheticDataset
from fairfold.flower.fleet.local_fleet import COMMAND
from tests.support.commands import works


def test_the_demonstration_ends_with_a_table_and_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "why.svg"
    output = works("demo", "--users", "60", "--items", "160", "--rounds", "2", "--picture", str(picture))
    for words in ("everybody full", "FAIR's mix", "everybody small", "only large devices", "left out", "popularity"):
        assert words in output
    recommended = output.split("A 16x device recommends:\n")[1].split("\n")[:3]
    assert all(line.endswith(")") for line in recommended)
    assert "FAIR's mix" in picture.read_text()
    assert picture.stat().st_size < 40_000


def test_names_are_different_and_say_the_strongest_trait() -> None:
    world = SyntheticDataset(users=5, items=40_000, interactions_per_user=3)
    titles = world.titles()
    assert len(set(titles)) == len(titles)
    genre = [title.split("(")[1] for title in titles]
    strongest = world.traits.abs().argmax(1)
    assert len({(int(strongest[item]), genre[item]) for item in range(2_000)}) == 16


@pytest.mark.slow
def test_a_fleet_to_be_joined_prints_its_link_and_ends_when_interrupted() -> None:
    """Its devices are tried in tests/device/test_in_chromium.py."""
    command = [*COMMAND, "demo", "--fleet", "--users", "40", "--items", "160"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True) as program:
        assert program.stdout is not None
        lines = []
        for line in program.stdout:
            lines.append(line.strip())
            if "Ctrl-C ends everything" in line:
                break
        (link,) = [line for line in lines if line.startswith("http://localhost:")]
        assert [part.partition(":")[2] for part in link.partition("#")[2].split(",")] == ["1x", "4x", "16x"]
        with urllib.request.urlopen(link.partition("#")[0], timeout=30) as page:
            assert page.headers["content-type"].startswith("text/html")
        program.send_signal(signal.SIGINT)
        assert "have ended" in program.stdout.read()
        assert program.wait(30) == 0
