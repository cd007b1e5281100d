"""Tabs of a real browser as devices of a fleet, beside a small Python device."""

import csv
import itertools
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from fairfold.flower.fleet.demo_fleet import DemoFleet
from fairfold.flower.fleet.processes import stop_on_exit
from fairfold.flower.fleet.relay import Relay
from fairfold.subspace import Capacity
from tests.support.browser import CHROMIUM, DESKTOP, PHONE, WHY, Browser, browser
from tests.support.settings import make_settings

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=WHY), pytest.mark.timeout(900)]
FEW: dict[str, Any] = {"name": "synthetic", "users": 40, "items": 300, "interactions_per_user": 40}
READ = (
    "new Promise(done => { const asked = indexedDB.open('fairfold', 1); asked.onsuccess = () => {"
    " const got = asked.result.transaction('parts').objectStore('parts')%s; got.onsuccess = () => done(%s); }; })"
)
IDLE_HEAP, SECURE_HEAP = 5_000_000, 12_000_000  # bytes of a page with its worker
STATUS = "document.querySelector('#status')?.dataset.state"
DONE = "document.querySelectorAll('#best li').length"


class Fleet:
    """A server with a small Python device, and a relay for tabs."""

    def __init__(self, folder: Path, tabs: tuple[str, ...], **keys: Any) -> None:
        settings = make_settings(
            rounds=4, evaluate_every=1, data=FEW, clients_per_round=None, capacities="1x-4x-16x", **keys
        )
        self.local = DemoFleet(settings, [Capacity.parse("1x")], folder, tabs=tabs)
        self.local.prepare(DemoFleet.of(settings, folder)[1])

    def __enter__(self) -> "Fleet":
        self._programs = stop_on_exit(self.local.programs)
        self._programs.__enter__()
        self.server = self.local.start_server()
        self.local.enrol_all()
        self.local.start_node(0)
        self.relay = Relay(0, self.local.port, self.local.server.authority).__enter__()
        self.link = self.local.link(self.relay.port)
        return self

    def __exit__(self, *error: Any) -> None:
        self.relay.__exit__()
        self._programs.__exit__(None, None, None)

    def train(self, devices: int) -> Any:
        deadline = time.monotonic() + 120
        while self.local.server.count_online()[0] < devices:
            assert time.monotonic() < deadline
            time.sleep(0.5)
        return self.local.start("run", "server", "train", str(self.local.server.folder), "--wait-for", str(devices))

    def wait(self, job: Any, seconds: float = 400.0) -> None:
        deadline = time.monotonic() + seconds
        while job.status() is None:
            assert time.monotonic() < deadline, job.tail()
            time.sleep(0.5)
        assert job.status() == 0, job.tail()


@pytest.fixture
def tab(tmp_path: Path) -> Iterator[Browser]:
    with browser(tmp_path / "profile", local=True) as opened:
        yield opened


def joined(tab: Browser, link: str, size: tuple[int, int] = DESKTOP, *, dark: bool = False) -> Browser:
    tab.open(link, size, dark=dark)
    tab.press("Use example data")
    tab.press("Join")
    tab.wait_for(f"{STATUS} === 'connected'")
    assert tab.value("document.activeElement.innerText") == tab.value("document.title")  # read aloud from its head
    return tab


def replies_by_round(fleet: Fleet) -> list[int]:
    rows = csv.DictReader((fleet.local.run_folder / "metrics.csv").read_text().splitlines())
    return [int(row["clients"]) for row in rows if row["clients"]]


def stored(tab: Browser, script: str) -> Any:
    """What IndexedDB has: an expression of the parts by name."""
    return tab.value(READ % (".getAllKeys()", script.replace("KEYS", "got.result")))


def test_a_mixed_fleet_trains_recommends_offline_and_forgets(tmp_path: Path, tab: Browser) -> None:
    with Fleet(tmp_path / "fleet", ("4x", "16x")) as fleet:
        joined(tab, fleet.link)
        other = joined(tab.another(), fleet.link, PHONE, dark=True)  # the next invitation of the same link
        assert (
            tab.value("document.body.innerText").count("4x"),
            other.value("document.body.innerText").count("16x"),
        ) == (1, 1)
        assert tab.heap()["usedSize"] < IDLE_HEAP
        third = tab.another()
        third.open(fleet.link, DESKTOP, dark=False)
        third.wait_for("document.title === 'This device is open in another tab'")
        third.close()

        job = fleet.train(3)
        other.wait_for("document.querySelectorAll('tbody tr').length", 200)
        other.do("Page.reload")  # at some moment of a round
        tab.wait_for(DONE, 400)
        other.wait_for(DONE, 60)
        fleet.wait(job)
        rounds = replies_by_round(fleet)
        assert len(rounds) == fleet.local.settings.run.rounds
        assert rounds.count(3) >= len(rounds) - 1  # at most the reloaded one missed a round
        for page in (tab, other):
            page.fits()
            assert page.value(
                "[...document.querySelectorAll('tbody td:nth-child(2)')].some(one => parseFloat(one.innerText) > 0)"
            )
            elsewhere = [url for url in page.asked_for if not url.startswith(("http://localhost:", "data:"))]
            assert not elsewhere
        best = tab.value("[...document.querySelectorAll('#best li')].map(one => one.innerText)")
        assert len(best) == 10
    tab.do("Page.reload")  # the server has ended
    tab.wait_for(DONE)
    assert tab.value("[...document.querySelectorAll('#best li')].map(one => one.innerText)") == best
    tab.wait_for(f"{STATUS} === 'waiting'")
    tab.press("Leave and delete everything")
    tab.wait_for("document.title === 'This browser has left the fleet'")
    assert stored(tab, "KEYS.length") > 0  # of the other tab
    other.do("Page.reload")
    other.value(
        READ.replace("transaction('parts')", "transaction('parts', 'readwrite')") % (".put({}, ['half', 'keys'])", "1")
    )
    other.press("Leave and delete everything")
    other.wait_for("document.title === 'This browser has left the fleet'")
    assert other.value("document.activeElement.innerText") == "This browser has left the fleet"
    assert stored(other, "KEYS.length") == 0
    assert other.value("navigator.serviceWorker.getRegistrations().then(all => all.length)") == 0
    assert other.value("caches.keys().then(all => all.length)") == 0


def test_the_demonstration_ends_with_recommendations_in_three_tabs(tmp_path: Path, tab: Browser) -> None:
    words = ["--users", "40", "--items", "160", "--rounds", "5"]
    command = [sys.executable, "-u", "-m", "fairfold", "demo", "--fleet", *words]
    with subprocess.Popen(command, cwd=tmp_path, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True) as demo:
        assert demo.stdout is not None
        try:
            link = next(line.strip() for line in demo.stdout if "#ff1-" in line)
            tabs = [tab, tab.another(), tab.another()]
            for page in tabs:
                joined(page, link)
            sizes = [page.value("document.querySelector('p.soft').innerText") for page in tabs]
            assert ["1x" in sizes[0], "4x" in sizes[1], "16x" in sizes[2]] == [True] * 3
            for page in tabs:
                page.wait_for(DONE, 400)
                assert page.value(DONE) == 10
            printed = list(itertools.takewhile(lambda line: not line.startswith("Trained:"), demo.stdout))
            assert any(line.startswith("round 5/5:") for line in printed)
            demo.send_signal(signal.SIGINT)
            assert "have ended" in demo.stdout.read()
            assert demo.wait(60) == 0
        finally:
            demo.kill()


def test_the_page_asks_first_and_refuses_in_words(tmp_path: Path, tab: Browser) -> None:
    with Fleet(tmp_path / "fleet", ("4x",)) as fleet:
        for size, dark in ((DESKTOP, False), (PHONE, True)):
            tab.open(fleet.link, size, dark=dark)
            tab.wait_for("document.title.startsWith('Join the fleet of A demonstration')")
            tab.fits()
            text = tab.value("document.body.innerText")
            for words in ("Who runs it", "What would leave this browser", "What never leaves it", "A demonstration on"):
                assert words in text
        unlabelled = "[...document.querySelectorAll('input, select')].filter(one => !one.labels.length).length"
        assert tab.value(unlabelled) == 0
        # A keyboard reaches everything, and the order is that of the page.
        reached = []
        for _ in range(5):
            tab.do("Input.dispatchKeyEvent", type="keyDown", key="Tab", code="Tab", windowsVirtualKeyCode=9)
            tab.do("Input.dispatchKeyEvent", type="keyUp", key="Tab", code="Tab", windowsVirtualKeyCode=9)
            reached.append(tab.value("document.activeElement.id || document.activeElement.innerText"))
        assert reached == ["file", "Use example data", "capacity", "secure", "cohort"]
        bad = {
            "picture.csv": (b"\x89PNG\r\n\x1a\n\xff\xfe", "a file that is no text in UTF-8"),
            "table.csv": (b"a,b\n1,2\n", "needed: a CSV file with a column item"),
            "empty.csv": (b"user,item\n", "a file without rows"),
            "hole.csv": (b"user,item\nu,\n", "a row without an item (number 1)"),
            "quote.csv": (b'user,item\n"u,x\n', "a quote that is not closed"),
            "other.csv": (
                b"user,item\nu,Nothing of this catalogue\n",
                "None of the items is in this fleet's catalogue",
            ),
        }
        for name, (content, words) in bad.items():
            (tmp_path / name).write_bytes(content)
            tab.choose("#file", tmp_path / name)
            tab.wait_for(f"document.querySelector('[role=alert]').innerText.includes({words!r})")
            assert tab.value("[...document.querySelectorAll('button')].find(one => one.innerText === 'Join').disabled")
        # Nothing is stored before Join, and no key can be exported after it.
        assert stored(tab, "KEYS.length") == 0
        joined(tab, fleet.link)
        assert stored(tab, "KEYS.map(([, part]) => part).includes('device')")
        keys = "['key', 'signer'].map(name => got.result.find(one => one.pem)[name].privateKey.extractable)"
        assert tab.value(READ % (".getAll()", keys)) == [False, False]
        cut = tab.another()
        cut.open(fleet.link, DESKTOP, dark=False)
        cut.value(f"location.hash = {fleet.link.partition('#')[2][:-9]!r}")
        cut.wait_for("document.body?.innerText.includes('cut off or has a typing error')")


def test_a_site_hands_over_rows(tmp_path: Path, tab: Browser) -> None:
    with Fleet(tmp_path / "fleet", ("4x",)) as fleet:
        names = (fleet.local.folder / "items.txt").read_text().splitlines()[:5]
        tab.open(f"http://localhost:{fleet.relay.port}/device.js", DESKTOP, dark=False)  # some page: a site's own
        tab.value(
            "addEventListener('message', event => event.data.fairfold === 'ready' &&"
            f" page.postMessage({{ fairfold: 'rows', rows: {json.dumps(names)} }}, '*'));"
            f"globalThis.page = open({fleet.link!r}); true"
        )
        tab.wait_for("page.document.body?.innerText.includes('Handed over by http://localhost')")
        assert tab.value(f"{json.dumps(names)}.every(name => page.document.body.innerText.includes(name))")
        tab.value("page.close()")
        joined(tab, fleet.link)
    del fleet


def test_secure_sums_beside_a_python_device(tmp_path: Path, tab: Browser) -> None:
    privacy = {"level": "secure", "min_cohort": 3}
    with Fleet(tmp_path / "fleet", ("4x", "4x"), privacy=privacy) as fleet:
        pages = [tab, tab.another()]
        for page in pages:
            page.open(fleet.link, DESKTOP, dark=False)
            page.press("Use example data")
            page.value("document.querySelector('#secure').click(), document.querySelector('#cohort').value = 3")
            page.press("Join")
            page.wait_for(f"{STATUS} === 'connected'")
        job = fleet.train(3)
        for page in pages:
            page.wait_for(DONE, 500)
        fleet.wait(job)
        assert "replied in plain" not in job.tail(500)
        assert tab.heap()["usedSize"] < SECURE_HEAP
        rounds = replies_by_round(fleet)
        assert set(rounds) == {3}
        # Each keeps the log of enrolled keys, which is the server's, beside the log of what it did.
        kept = "got.result.filter(one => one.hash).map(one => [one.lines, one.hash, one.keys.size])"
        head = fleet.local.server.roster().head()
        assert tab.value(READ % (".getAll()", kept)) == [[3, head.hash, 3]] * 2
        assert head.lines == 3
        # From now on these devices give nothing in plain.
        assert tab.value(READ % (".getAll()", "got.result.includes('secure')"))
