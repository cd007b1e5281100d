"""The pages that fairfold writes, as a real browser shows them: on a desk and on a phone, light and dark."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from experiments.output import write_results
from tests.experiments.test_output import made_up
from tests.support.browser import CHROMIUM, DESKTOP, PHONE, WHY, Browser, browser
from tests.support.commands import TINY, works

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason=WHY)
LOOKS = [(size, dark) for size in (DESKTOP, PHONE) for dark in (False, True)]


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    for scheme in ("1x-4x-16x", "16x"):
        works(
            "train", *TINY, "--capacities", scheme, "--set", "algorithm.kind=closed_form", "--out", str(folder / scheme)
        )
    works("report", str(folder / "1x-4x-16x"), str(folder / "16x"), "--out", str(folder / "report"))
    return folder / "report" / "report.html"


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    (folder / "small").mkdir()
    return write_results(made_up(folder), folder)[-1]


def brightness(color: str) -> float:
    red, green, blue = map(float, re.findall(r"[\d.]+", color)[:3])
    return (0.3 * red + 0.6 * green + 0.1 * blue) / 255


def looked_at(tab: Browser, page: Path, size: tuple[int, int], dark: bool) -> dict[str, Any]:
    """Open a page; it fits, fetches nothing, and can be read."""
    tab.open(page, size, dark=dark)
    tab.fits()
    tab.stays_here()
    style = "getComputedStyle(document.querySelector('%s')).%s"
    ground, ink = (tab.value(style % ("body", name)) for name in ("backgroundColor", "color"))
    assert (brightness(ground) < 0.3) == dark
    assert abs(brightness(ground) - brightness(ink)) > 0.5
    return {"picture": tab.value("document.querySelector('img').getBoundingClientRect().toJSON()")}


@pytest.mark.parametrize(("size", "dark"), LOOKS)
def test_a_report_can_be_read(tab: Browser, report: Path, size: tuple[int, int], dark: bool) -> None:
    seen = looked_at(tab, report, size, dark)
    assert seen["picture"]["top"] < size[1], "the picture is on the first screen"
    assert seen["picture"]["width"] > 0.8 * min(size[0], 760)
    first = tab.value("document.querySelector('.card h3').textContent")
    assert first == "quality against bytes held"
    memory = tab.value(
        "[...document.querySelectorAll('td')].map(e => e.textContent).filter(t => / k?B$/.test(t)).length"
    )
    assert memory >= 12  # held, received and sent, of four sizes
    if size == PHONE:  # the wide table scrolls under the finger, and its first column stays
        moved = tab.value(
            "(() => { const box = [...document.querySelectorAll('.scroll')].find(e => e.scrollWidth > e.clientWidth);"
            " box.scrollLeft = 60; const cell = box.querySelector('td');"
            " return [box.scrollLeft, cell.getBoundingClientRect().left - box.getBoundingClientRect().left]; })()"
        )
        assert moved[0] == 60
        assert abs(moved[1]) < 1


@pytest.mark.parametrize(("size", "dark"), LOOKS)
def test_results_open_with_a_picture_and_unfold(tab: Browser, results: Path, size: tuple[int, int], dark: bool) -> None:
    seen = looked_at(tab, results, size, dark)
    assert seen["picture"]["top"] < size[1]
    folded = "[...document.querySelectorAll('details')].map(e => e.getBoundingClientRect().height)"
    before = tab.value(folded)
    tab.value("document.querySelectorAll('summary').forEach(e => e.click())")
    assert all(now > was for now, was in zip(tab.value(folded), before, strict=True))
    tab.fits()
