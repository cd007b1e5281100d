"""Units and the container file: what they start are commands that exist, and systemd takes the units."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.test_pages import refuse_unknown

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))


def test_there_is_a_unit_for_each_side_and_one_for_training() -> None:
    assert [unit.stem for unit in UNITS] == ["fairfold-node", "fairfold-server", "fairfold-train"]


@pytest.mark.parametrize("path", [*UNITS, DEPLOY / "Containerfile"], ids=lambda path: path.name)
def test_commands_in_units_and_the_container_file_exist(path: Path) -> None:
    text = path.read_text().replace("\\\n#", "")
    found = re.findall(r"(fairfold (?:server|node) [a-z]+ .*?)(?: &&.*)?$", text, re.MULTILINE)
    assert found
    for line in found:
        refuse_unknown(line.replace(" N", " 7"))


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_systemd_takes_the_units(unit: Path, tmp_path: Path) -> None:
    (tmp_path / unit.name).write_text(unit.read_text().replace("/opt/fairfold/bin/fairfold", "/bin/true"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(tmp_path / unit.name)], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
