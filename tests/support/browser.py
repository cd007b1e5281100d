"""Pages as a real browser shows them: Chromium without a window, controlled over a pipe.

It comes from a system's packages (``apt-get install chromium``). It may fetch nothing from a network but, where a test
says so, from this machine.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WHY = "no Chromium on this machine: apt-get install chromium"
DESKTOP, PHONE = (1280, 900), (390, 844)
"""Width and height in pixels of CSS."""


class Pipe:
    """The orders to a browser and its replies, which all tabs share."""

    def __init__(self, orders: BinaryIO, replies: BinaryIO) -> None:
        self.orders, self.replies = orders, replies
        self.numbers, self.left = itertools.count(1), b""
        self.workers: dict[str, set[str]] = {}  # sessions of workers, by that of their page


class Browser:
    """One tab."""

    def __init__(self, pipe: Pipe) -> None:
        self._pipe, self._session = pipe, ""
        self.asked_for: list[str] = []
        """Addresses that pages asked for since the last one was opened."""
        self.target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=self.target, flatten=True)["sessionId"]
        self.do("Network.enable")
        self.do("Page.enable")
        self.do("Target.setAutoAttach", autoAttach=True, waitForDebuggerOnStart=False, flatten=True)

    def another(self) -> "Browser":
        """Another tab of the same browser."""
        return Browser(self._pipe)

    def close(self) -> None:
        """Close the tab, as a person does."""
        self.do("Target.closeTarget", targetId=self.target)

    def do(self, method: str, *, session: str = "", **parameters: Any) -> dict[str, Any]:
        """Give an order to the tab or one of its workers, and wait for its reply."""
        number = next(self._pipe.numbers)
        order = {"id": number, "method": method, "params": parameters}
        session = session or self._session
        addressed = order | ({"sessionId": session} if session else {})
        self._pipe.orders.write(json.dumps(addressed).encode() + b"\0")
        self._pipe.orders.flush()
        while (received := self._receive()).get("id") != number:
            pass
        assert "error" not in received, f"{method}: {received['error']}"
        found: dict[str, Any] = received["result"]
        return found

    def _receive(self) -> dict[str, Any]:
        pipe = self._pipe
        while b"\0" not in pipe.left:
            more = os.read(pipe.replies.fileno(), 1 << 16)
            assert more, "the browser is gone"
            pipe.left += more
        message, _, pipe.left = pipe.left.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        method, where = received.get("method"), received.get("sessionId", "")
        if method == "Network.requestWillBeSent":
            self.asked_for.append(received["params"]["request"]["url"])
        elif method == "Target.attachedToTarget" and received["params"]["targetInfo"]["type"] == "worker":
            pipe.workers.setdefault(where, set()).add(received["params"]["sessionId"])
        elif method == "Target.detachedFromTarget":
            pipe.workers.get(where, set()).discard(received["params"]["sessionId"])
        return received

    def open(self, page: Path | str, size: tuple[int, int], *, dark: bool) -> None:
        """Show a file or an address, on a screen of this size, to somebody who likes it light or dark; wait for it."""
        self.asked_for.clear()
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=size[0], height=size[1], deviceScaleFactor=1, mobile=size == PHONE,
        )  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.do("Emulation.setEmulatedMedia", features=scheme)
        opened = self.do("Page.navigate", url=page if isinstance(page, str) else page.resolve().as_uri())
        if "loaderId" not in opened:  # the same address again
            self.do("Page.reload")
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def value(self, script: str) -> Any:
        """What an expression in JavaScript is on the page."""
        found = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def press(self, words: str) -> None:
        """Press the button with some words; a question that it asks is answered with yes."""
        button = f"[...document.querySelectorAll('button')].find(one => one.innerText === {words!r} && !one.disabled)"
        self.wait_for(f"Boolean({button})")
        self.value(f"globalThis.confirm = () => true; {button}.click()")

    def choose(self, selector: str, path: Path) -> None:
        """Choose a file."""
        found = self.do("Runtime.evaluate", expression=f"document.querySelector({selector!r})")
        self.do("DOM.setFileInputFiles", files=[str(path)], objectId=found["result"]["objectId"])

    def heap(self) -> dict[str, int]:
        """Bytes of the heaps of JavaScript of page and workers, after garbage collection, and of their buffers."""
        total = {"usedSize": 0, "backingStorageSize": 0}
        for session in ["", *self._pipe.workers.get(self._session, ())]:
            self.do("HeapProfiler.collectGarbage", session=session)
            found = self.do("Runtime.getHeapUsage", session=session)
            total = {key: value + int(found.get(key, 0)) for key, value in total.items()}
        return total

    def wait_for(self, script: str, seconds: float = 60.0) -> Any:
        """Wait until an expression is true on the page; returns its value."""
        deadline = time.monotonic() + seconds
        while not (found := self.value(script)):
            assert time.monotonic() < deadline, f"{script}; the page says {self.value('document.body.innerText')!r}"
            time.sleep(0.2)
        return found

    def picture(self, path: Path) -> None:
        """The whole page, as long as it is, as a PNG file."""
        found = self.do("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))

    def fits(self) -> None:
        """The page is no wider than the screen, and nothing sticks out of it but what scrolls by itself."""
        assert self.value("document.documentElement.scrollWidth <= window.innerWidth"), self.value(
            "[...document.querySelectorAll('*')].filter(e => e.getBoundingClientRect().right > window.innerWidth + 1)"
            ".slice(0, 5).map(e => e.outerHTML.slice(0, 120))"
        )

    def stays_here(self) -> None:
        """Nothing was asked of a network."""
        elsewhere = [address for address in self.asked_for if not address.startswith(("file:", "data:", "blob:"))]
        assert not elsewhere


@contextlib.contextmanager
def browser(folder: Path, *, local: bool = False) -> Iterator[Browser]:
    """A browser whose profile is in a folder; it ends with the block. It may reach this machine if ``local``."""
    names = "MAP * ~NOTFOUND" + (", EXCLUDE localhost, EXCLUDE 127.0.0.1" if local else "")
    (orders, give), (receive, replies) = os.pipe(), os.pipe()
    words = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", "--no-first-run", f"--host-resolver-rules={names}", f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
    ]  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{orders} 4>&{replies}', "bash", *words],
        pass_fds=(orders, replies), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(orders)
    os.close(replies)
    try:
        with os.fdopen(give, "wb") as orders_to, os.fdopen(receive, "rb") as output:
            yield Browser(Pipe(orders_to, output))
    finally:
        process.terminate()
        process.wait(30)
