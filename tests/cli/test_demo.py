"""The demonstration: one table, one picture, three recommendations with names."""

from pathlib import Path

from fairfold.data.synthetic import SyntheticDataset
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
