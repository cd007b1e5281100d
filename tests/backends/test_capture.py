"""Recordings of a GPU's work are made undisturbed."""

import gc

from fairfold.backends.capture import gc_paused


class Recording:
    """Says when it is freed; in a circle, so that only the collector finds it."""

    freed = 0

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        Recording.freed += 1


def test_nothing_is_freed_while_a_recording_is_made() -> None:
    Recording()
    before = Recording.freed
    with gc_paused():
        assert Recording.freed == before + 1  # what was there is freed first
        Recording()
        held = [[number] for number in range(100_000)]  # enough objects to start the collector several times
        assert Recording.freed == before + 1, len(held)
    assert gc.isenabled()
    gc.collect()
    assert Recording.freed == before + 2
