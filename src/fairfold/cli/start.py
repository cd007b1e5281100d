"""Signals in the first moments of a command, while modules are loaded."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn


def end_now(status: int, message: bytes = b"interrupted\n") -> NoReturn:
    """Write a message by system calls alone, and end the process."""
    with suppress(OSError):
        os.write(2, message)
    os._exit(status)


@contextmanager
def on_signals(handler: Callable[[int, FrameType | None], None], *numbers: signal.Signals) -> Iterator[None]:
    """Handle signals that have their default handlers, within the context."""
    defaults: dict[signal.Signals, Any] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}
    main = threading.current_thread() is threading.main_thread()
    handled = [number for number in numbers if main and signal.getsignal(number) == defaults[number]]
    for number in handled:
        signal.signal(number, handler)
    try:
        yield
    finally:
        for number in handled:
            signal.signal(number, defaults[number])


def interruptible() -> AbstractContextManager[None]:
    """A context in which Ctrl-C and SIGTERM end the process at once: there is nothing to unwind."""
    return on_signals(lambda number, _frame: end_now(128 + number), signal.SIGINT, signal.SIGTERM)
