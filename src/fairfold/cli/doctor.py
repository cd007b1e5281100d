"""``fairfold doctor``: what is installed, what is missing, and what it would give."""

import importlib.metadata
import importlib.util
import platform

from rich.console import Console
from rich.table import Table

EXTRAS = [
    # module, what it gives, how to get it
    ("matplotlib", "plots in reports", "pip install 'fairfold[report]'"),
    ("triton", "GPU kernels (CUDA)", "comes with torch's CUDA build"),
    ("flwr", "federations over a network (fairfold federate)", "pip install 'fairfold[flower]'"),
    ("tensorboard", "curves of a run while it trains", "pip install 'fairfold[tensorboard]'"),
]


def doctor() -> None:
    """Say what is installed, what is missing and what it would give."""
    import torch

    from fairfold.version import __version__

    table = Table(title="fairfold doctor")
    for heading in ("part", "state", "what it means"):
        table.add_column(heading)
    table.add_row("fairfold", __version__, f"Python {platform.python_version()} on {platform.machine()}")
    table.add_row("torch", torch.__version__, f"{torch.get_num_threads()} threads")
    table.add_row("native kernels", *_native())
    if torch.cuda.is_available():
        table.add_row("GPU", torch.cuda.get_device_name(), "serves tensors on it; kernels need triton")
    else:
        table.add_row("GPU", "[yellow]none[/yellow]", "training runs on the CPU; a CUDA build of torch would use one")
    for module, gives, remedy in EXTRAS:
        if importlib.util.find_spec(module):
            table.add_row(module, importlib.metadata.version(module), gives)
        else:
            table.add_row(module, "[yellow]missing[/yellow]", f"{gives}: {remedy}".replace("[", r"\["))
    Console().print(table)


def _native() -> tuple[str, str]:
    from fairfold.kernels.native import status

    found = status()
    if found.available:
        threads = "threaded" if found.threaded else "one thread"
        return f"present ({found.instructions})", f"compiled kernels serve on the CPU, {threads}"
    reason = f"plain torch serves, several times slower: {found.reason}. With a C compiler, install fairfold again"
    return "[yellow]missing[/yellow]", reason.replace("[", r"\[")
