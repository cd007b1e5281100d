"""The site of the pages: it builds without a warning, asks nothing of a network, and can be searched and read."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.browser import CHROMIUM, DESKTOP, PHONE, WHY, browser

ROOT = Path(__file__).parents[1]
EXTRA = "the builder is not installed: pip install -c constraints.txt -e '.[docs]'"


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    for name in ("sphinx", "furo", "myst_parser", "sphinx_copybutton"):
        pytest.importorskip(name, reason=EXTRA)
    out = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "sphinx", "--fail-on-warning", "--keep-going", "--quiet", "-b", "html"]
    kept = ["-d", str(tmp_path_factory.mktemp("doctrees"))]
    done = subprocess.run([*words, *kept, str(ROOT / "docs"), str(out)], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    return out


def test_the_site_has_every_page_and_nothing_of_elsewhere(site: Path) -> None:
    pages = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    sources = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert sources <= pages
    for page in site.rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        fetched = re.findall(r'<(?:script|img|iframe)\b[^>]*\bsrc="([^"]+)"|<link\b[^>]*\bhref="([^"]+)"', text)
        assert not [link for pair in fetched for link in pair if re.match(r"(?:https?:)?//", link)], page.name
    for style in site.rglob("*.css"):
        assert not re.search(r"(?:url\(|@import)\s*['\"]?https?:", style.read_text(encoding="utf-8")), style.name
    first = (site / "index.html").read_text(encoding="utf-8")
    doors = re.findall(r'<a href="([^"]+)"><b>', first)
    assert len(doors) == 4
    assert all((site / door).is_file() for door in doors)
    words = (site / "_static" / "words.js").read_text(encoding="utf-8")
    assert '"client": "A participant of a federation' in words
    api = (site / "api" / "fairfold.html").read_text(encoding="utf-8")
    assert "Sizes of the devices" in api, "arguments come from docstrings"


@pytest.mark.skipif(CHROMIUM is None, reason=WHY)
def test_the_site_can_be_read_and_searched_from_a_disk(site: Path, tmp_path: Path) -> None:
    with browser(tmp_path) as tab:
        for size in (DESKTOP, PHONE):
            for dark in (False, True):
                for name in ("index", "settings", "tutorials/csv", "api/nn"):
                    tab.open(site / f"{name}.html", size, dark=dark)
                    tab.fits()
                    tab.stays_here()
        tab.open(site / "search.html", DESKTOP, dark=False)
        found = tab.value(
            "new Promise(done => { Search.performSearch('collapsible'); setTimeout(() => "
            "done([...document.querySelectorAll('#search-results a')].map(a => a.getAttribute('href'))), 1500); })"
        )
        assert any("concepts.html" in link for link in found)
        tab.stays_here()
