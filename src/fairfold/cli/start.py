"""The first moments of a command, in which nothing but the interpreter is there to take an interruption."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn


def end_now(status: int, words: bytes = b"interrupted\n") -> NoReturn:
    """Say that the command was interrupted, by nothing but the system's own calls, and end."""
    with suppress(OSError):
        os.write(2, words)
    os._exit(status)


@contextmanager
def interruptible() -> Iterator[None]:
    """End at once, with a word, where Ctrl-C or SIGTERM comes while modules are loaded: there is nothing to unwind."""

    def end(number: int, _frame: FrameType | None) -> NoReturn:
        end_now(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    usual: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    mine = [number for number, handler in usual.items() if signal.getsignal(number) == handler]
    for number in mine:
        signal.signal(number, end)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, usual[number])
