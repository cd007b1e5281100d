"""``fairfold doctor``: what is installed, what is missing, and what it would give."""

import importlib.metadata
import platform

from rich.console import Console
from rich.markup import escape
from rich.table import Table

EXTRAS = [
    # module, what it gives, how to get it
    ("matplotlib", "plots in reports", "pip install 'fairfold[report]'"),
    ("triton", "GPU kernels (CUDA)", "comes with torch's CUDA build"),
    ("flwr", "federations over a network (fairfold federate)", "pip install 'fairfold[flower]'"),
    ("tensorboard", "curves of a run (train --track tensorboard)", "pip install 'fairfold[tensorboard]'"),
    ("mlflow", "the same in MLflow (--track mlflow)", "pip install 'fairfold[mlflow]'"),
    ("wandb", "the same in Weights & Biases (--track wandb)", "pip install 'fairfold[wandb]'"),
]
MISSING = "[yellow]missing[/yellow]"


def doctor() -> None:
    """Say what is installed, what is missing, and what it would be good for.

    Examples:
        fairfold doctor
    """
    import torch

    from fairfold.kernels.gpu import triton_problem
    from fairfold.kernels.native import status
    from fairfold.version import __version__

    table = Table("part", "state", "what it means", title="fairfold doctor")
    table.add_row("fairfold", __version__, f"Python {platform.python_version()} on {platform.machine()}")
    table.add_row("torch", torch.__version__, f"{torch.get_num_threads()} threads")
    native = status()
    if native.available:
        serves = f"compiled kernels serve on the CPU, {'threaded' if native.threaded else 'one thread'}"
        table.add_row("native kernels", f"present ({native.instructions})", serves)
    else:
        why = f"plain torch serves, several times slower: {native.reason}. With a C compiler, install fairfold again"
        table.add_row("native kernels", MISSING, escape(why))
    if torch.cuda.is_available():
        table.add_row("GPU", torch.cuda.get_device_name(), "serves tensors on it; kernels need triton")
    else:
        table.add_row("GPU", "[yellow]none[/yellow]", "training runs on the CPU; a CUDA build of torch would use one")
    packages = importlib.metadata.packages_distributions()  # a module may come from a package of another name
    for module, gives, remedy in EXTRAS:
        if module in packages:
            problem = triton_problem() if module == "triton" else None  # which may be too old for the kernels
            state = importlib.metadata.version(packages[module][0])
            table.add_row(module, state, gives if problem is None else escape(f"{gives}: {problem}"))
        else:
            table.add_row(module, MISSING, escape(f"{gives}: {remedy}"))
    Console().print(table)
