"""Pages as a real browser shows them: Chromium without a window, spoken to over a pipe.

It comes from a system's packages (``apt-get install chromium``). It may fetch nothing from a network.
"""

import base64
import contextlib
import itertools
import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WHY = "no Chromium on this machine: apt-get install chromium"
DESKTOP, PHONE = (1280, 900), (390, 844)
"""Width and height in pixels of CSS."""


class Browser:
    """One tab."""

    def __init__(self, orders: BinaryIO, answers: BinaryIO) -> None:
        self._orders, self._answers = orders, answers
        self._numbers, self._left, self._session = itertools.count(1), b"", ""
        self.asked_for: list[str] = []
        """Addresses that pages asked for since the last one was opened."""
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self.do("Network.enable")
        self.do("Page.enable")

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Give an order, and wait for its answer."""
        number = next(self._numbers)
        order = {"id": number, "method": method, "params": parameters}
        self._orders.write(json.dumps(order | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        self._orders.flush()
        while (received := self._receive()).get("id") != number:
            pass
        assert "error" not in received, f"{method}: {received['error']}"
        found: dict[str, Any] = received["result"]
        return found

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            more = os.read(self._answers.fileno(), 1 << 16)
            assert more, "the browser is gone"
            self._left += more
        message, _, self._left = self._left.partition(b"\0")
        received: dict[str, Any] = json.loads(message)
        if received.get("method") == "Network.requestWillBeSent":
            self.asked_for.append(received["params"]["request"]["url"])
        return received

    def open(self, page: Path, size: tuple[int, int], *, dark: bool) -> None:
        """Show a file, on a screen of this size, to somebody who likes it light or dark; wait until it is there."""
        self.asked_for.clear()
        self.do(
            "Emulation.setDeviceMetricsOverride",
            width=size[0], height=size[1], deviceScaleFactor=1, mobile=size == PHONE,
        )  # fmt: skip
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.do("Emulation.setEmulatedMedia", features=scheme)
        self.do("Page.navigate", url=page.resolve().as_uri())
        while self._receive().get("method") != "Page.loadEventFired":
            pass

    def value(self, script: str) -> Any:
        """What an expression in JavaScript is on the page."""
        found = self.do("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

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
def browser(folder: Path) -> Iterator[Browser]:
    """A browser whose profile is in a folder; it ends with the block."""
    (orders, give), (receive, answers) = os.pipe(), os.pipe()
    words = [
        str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
        "--hide-scrollbars", "--no-first-run", "--host-resolver-rules=MAP * ~NOTFOUND", f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
    ]  # fmt: skip
    process = subprocess.Popen(
        ["bash", "-c", f'exec "$@" 3<&{orders} 4>&{answers}', "bash", *words],
        pass_fds=(orders, answers), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    os.close(orders)
    os.close(answers)
    try:
        with os.fdopen(give, "wb") as orders_to, os.fdopen(receive, "rb") as answers_of:
            yield Browser(orders_to, answers_of)
    finally:
        process.terminate()
        process.wait(30)
