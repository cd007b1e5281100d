"""The README's Python runs as it stands."""

import re
from pathlib import Path

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_the_python_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) >= 3
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    assert names["table"].compact.numel() * 64 == 64_000_000  # type: ignore[attr-defined]
    assert names["result"].quality > 0  # type: ignore[attr-defined]


def test_the_two_commands_come_first() -> None:
    first = README.split("```")[1]
    assert "make run" in first
    assert "make test" in first
