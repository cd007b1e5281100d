"""Being asked to end."""

import contextlib
import signal
import threading
from collections.abc import Iterator


@contextlib.contextmanager
def terminated() -> Iterator[None]:
    """SIGTERM is like Ctrl-C: what was begun is brought to an end, and a person is told how to go on."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
