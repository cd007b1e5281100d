"""Runs that several processes share: the first one writes the folder, and the others follow it.

All of them run the same simulation on the same data. The settings and what a checkpoint holds come from the first, so
that only that one needs the folder of the run; each reads the data for itself, after the first has prepared it.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from fairfold.protocol.faults import Rejections
from fairfold.protocol.ranks import Ranks
from fairfold.settings import Settings, read_settings
from fairfold.simulate.result import RoundReport
from fairfold.simulate.run import Progress, simulate
from fairfold.simulate.world import load_data


def began(ranks: Ranks, choose: Callable[[], Settings]) -> Settings:
    """The settings that the first process chooses, for all."""
    found = None
    with ranks.one_for_all():
        found = choose() if ranks.first else None
    told = ranks.tell(None if found is None else found.plain())
    return found if found is not None else read_settings(told or {})


def lead(ranks: Ranks, progress: Progress | None) -> None:
    """The first process has data, a folder and where to go on; it waits for the others to have them."""
    if ranks.many == 1:
        return
    with ranks.one_for_all():
        pass
    ranks.led = True
    with ranks.one_for_all():
        pass
    ranks.tell(None if progress is None else _told(progress))


@contextmanager
def leading(ranks: Ranks) -> Iterator[None]:
    """An error before the others have been led anywhere is told to them, who wait."""
    try:
        yield
    except Exception:
        if not ranks.led:
            with ranks.one_for_all():
                raise
        raise


def follow(settings: Settings, ranks: Ranks) -> None:
    """Take part in a run that the first process leads."""
    quiet = logging.getLogger("fairfold")
    quiet.addHandler(logging.NullHandler())
    quiet.propagate = False
    with ranks.one_for_all():
        pass  # the first one reads and prepares
    with ranks.one_for_all():
        data, references = load_data(settings)
    told: Any = ranks.tell(None)
    progress = None if told is None else Progress(told[0], told[1], told[2], Rejections(told[3]))

    def watch(_report: RoundReport, progress: Progress) -> None:
        if ranks.tell(False):
            progress.gather()

    simulate(settings, watch, data=data, references=references, progress=progress, ranks=ranks)


def _told(progress: Progress) -> tuple[object, ...]:
    return progress.state, progress.private, progress.history, progress.rejections.counts
