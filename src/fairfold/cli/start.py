"""The first moments of a command, in which nothing but the interpreter is there to take an interruption."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn


def end_now(status: int, words: bytes = b"interrupted\n") -> NoReturn:
    """Say that the command was interrupted, by nothing but the system's own calls, and end."""
    with suppress(OSError):
        os.write(2, words)
    os._exit(status)


@contextmanager
def on_signals(act: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Act so on these signals, unless whoever called has other plans for them."""
    usual: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    main = threading.current_thread() is threading.main_thread()
    mine = [number for number in numbers if main and signal.getsignal(number) == usual[number]]
    for number in mine:
        signal.signal(number, act)
    try:
        yield
    finally:
        for number in mine:
            signal.signal(number, usual[number])


def interruptible() -> AbstractContextManager[None]:
    """End at once, with a word, where Ctrl-C or SIGTERM comes while modules are loaded: there is nothing to unwind."""
    return on_signals(lambda number, _frame: end_now(128 + number), signal.SIGINT, signal.SIGTERM)
