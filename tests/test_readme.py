"""What a newcomer meets first; tests/test_blocks.py runs all that README shows."""

from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def test_it_opens_with_the_picture_the_paper_and_how_to_start() -> None:
    before, first = README.split("```")[:2]
    assert before.index("docs/why.svg") < before.index("https://arxiv.org/abs/2311.01722")
    assert first.strip().startswith("pip install")
    assert "make run" in first
    assert "make test" in first


def test_it_is_short() -> None:
    assert README.count("\n") < 150
