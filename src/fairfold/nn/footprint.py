"""The memory and traffic that a device needs: a formula, and a process that measures the real peak.

With m slots of b bytes, B rows a batch, R distinct rows a round and rows of d numbers (so that a round touches
k = min(m, R·d) slots at most):

* serving: m·b for the vector, B·d·b for the result, and T, what the lookup needs while it works;
* training a round on its active set: m·b for the vector; 5 bytes for each of the R·d weights (its place among the
  active slots, and its sign); 8 + 4·b for each of the k slots (number, value, gradient, two moments); 4·B·d·b for
  the rows of a batch with their gradient; and the larger of T and 40·R·d, what finding the active slots takes (a sort).

T is the bound of :data:`fairfold.kernels.reference.TEMPORARY_BYTES`, or 128 bytes a number if the batch is shorter.
The interpreter and torch themselves (about 200 MB) come on top. ``python -m fairfold.nn.footprint`` with a job in JSON
trains one such device and prints its peak.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from fairfold.errors import FairfoldError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from fairfold.nn.embedding import FairTable


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes a device needs."""

    stored: int  # of the compact vector, which also crosses the network once in each direction of a round
    serving: int  # at the peak of a lookup
    training: int  # at the peak of a round


def footprint(size: int, dim: int, batch: int, rows: int, itemsize: int = 4) -> Footprint:
    """The formula of this page: m, d, B (rows looked up at once), R (distinct rows a round touches) and b."""
    from fairfold.kernels.reference import TEMPORARY_BYTES

    stored = size * itemsize
    temporary = min(TEMPORARY_BYTES, 128 * batch * dim)
    touched = min(size, rows * dim)
    training = 5 * rows * dim + (8 + 4 * itemsize) * touched + 4 * batch * dim * itemsize
    serving = stored + batch * dim * itemsize + temporary
    return Footprint(stored, serving, stored + training + max(temporary, 40 * rows * dim))


@dataclass(frozen=True, slots=True)
class FootprintJob:
    """The work of a measured process: make a table, look up, train one round."""

    items: int  # rows of the table
    dim: int  # its columns
    size: int  # slots
    mapping: str = "element"
    chunk: int = 1
    batch: int = 512  # rows a step
    rows: int = 5000  # rows a round
    way: str = "active"  # Adam on the active set; "backward": SGD inside; or "serve"


def measure(job: FootprintJob) -> int:
    """Bytes by which the peak of a process with this job exceeds that of the same process with an empty model."""
    empty = FootprintJob(job.batch, job.dim, max(job.chunk, 2) * 2, job.mapping, job.chunk, 1, 1, job.way)
    return _peak_of_process(job) - _peak_of_process(empty)


def _peak_of_process(job: FootprintJob) -> int:
    command = [sys.executable, "-m", "fairfold.nn.footprint", json.dumps(asdict(job))]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1:] or [f"exit status {process.returncode}"]
        remedy = "Try a smaller budget or fewer items."
        raise FairfoldError(f"a device that failed: {last[0]}", "a run to its end", remedy)
    return int(json.loads(process.stdout)["peak"])


def peak_bytes() -> int:
    """The most memory this process has held so far."""
    # The kernel's own mark where there is one: getrusage also counts what the parent held before it started this one.
    with suppress(OSError), open("/proc/self/status", encoding="ascii") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def run(job: FootprintJob) -> None:
    """Do the job in this process."""
    import torch

    from fairfold.nn import FairEmbedding, active
    from fairfold.nn.lookup import FusedSGD

    torch.manual_seed(0)
    table = FairEmbedding(job.items, job.dim, size=job.size, mapping=job.mapping, chunk=job.chunk)
    ids = torch.randint(0, job.items, (job.rows,))
    with torch.no_grad():
        table(ids[: job.batch])
    batches = torch.split(ids, job.batch)
    if job.way == "active":
        with active(table, ids) as rows:
            _train_batches(table, batches, torch.optim.Adam(rows.parameters()))
    elif job.way == "backward":
        table.update_in_backward(FusedSGD())
        _train_batches(table, batches, None)


def _train_batches(table: "FairTable", batches: "Sequence[Tensor]", optimizer: "Optimizer | None") -> None:
    for batch in batches:
        table.rows(batch).square().mean().backward()  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    run(FootprintJob(**json.loads(sys.argv[1])))
    sys.stdout.write(json.dumps({"peak": peak_bytes()}))
