"""In which order cells start when several run side by side."""

from collections import defaultdict
from collections.abc import Sequence

from fairfold.reproduce.experiment import Cell
from fairfold.reproduce.kinds import KINDS


def side_by_side(cells: Sequence[Cell]) -> list[Cell]:
    """The order to start cells in: one seed after the other, long ones first, and all kinds of work all the time.

    Tables of one seed are to be read early. What starts last should be short, or processes wait for a single one. And
    cells that need the same (networks of images fill a GPU, other cells a core) slow each other down: each kind of
    work is spread over a seed's time by the share of its own work that has been started, so all of them end together.
    """
    kinds: dict[tuple[int, str], list[Cell]] = defaultdict(list)
    for cell in cells:
        kinds[cell.seed, KINDS[cell.kind].needs(cell.values)].append(cell)
    starts: list[tuple[int, float, Cell]] = []
    for (seed, _), alike in kinds.items():
        work = {cell: KINDS[cell.kind].work(cell.values) for cell in alike}
        before, total = 0.0, sum(work.values())
        for cell in sorted(alike, key=lambda cell: -work[cell]):
            starts.append((seed, before / total, cell))
            before += work[cell]
    return [cell for *_, cell in sorted(starts, key=lambda start: start[:2])]
