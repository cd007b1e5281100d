"""``fairfold export``: the model of a device of any size, from one server's checkpoint."""

from pathlib import Path
from typing import Annotated

import typer

from fairfold.cli.console import Terminal

Run = Annotated[Path, typer.Argument(help="Folder of a run.")]
Newest = Annotated[
    bool,
    typer.Option(
        "--newest", help="Refuse if the newest checkpoint is damaged; otherwise the newest whole one is taken."
    ),
]


def export(
    run: Run,
    capacity: Annotated[
        str, typer.Option(help="Size of the device: 16x, 1/16 or 40MB. Such devices need not have taken part.")
    ],
    out: Annotated[Path | None, typer.Option(help="File to write. Default: RUN/device-CAPACITY.safetensors.")] = None,
    newest: Newest = False,
) -> None:
    """Write the model of a device to a file, and print its quality on the test set.

    The file (safetensors) holds all that is needed to recommend, without the run and its data; docs/export.md describes
    it. In Python fairfold.runs.device.read_device_model reads it.

    Examples:
        fairfold export runs/first --capacity 16x --out small.safetensors
    """
    from fairfold.cli.plan import cut_of
    from fairfold.runs.device import device_model, quality, write_device_model
    from fairfold.runs.opened import open_run
    from fairfold.runs.units import human_bytes
    from fairfold.subspace import Capacity

    console, size = Terminal(), Capacity.parse(capacity)
    opened = open_run(run, console.say, newest=newest)
    device = device_model(opened, size)
    measured = quality(opened, device)
    path = run / f"device-{size}.safetensors" if out is None else out
    written = write_device_model(opened, device, path, measured)
    metric, value, server = measured
    full_size = sum(tensor.numel() for tensor in opened.progress.state.full.values())
    asked = "on all test images" if opened.settings.model.reads_images else "over all users"
    asked = "as devices said" if opened.settings.data.kind == "devices" else asked
    cut = cut_of(device.projections)
    held = f" ({', '.join(f'{name} {value}' for name, value in cut.items())})" if cut else ""
    note = "" if device.trained else " No device of this size took part in the run."
    if not device.nests:
        note += " Its size does not nest with those of the run: a model to use, not to train along."
    console.say(
        f"{path}: {device.size:,} of {full_size:,} numbers{held}, {human_bytes(written)}. "
        f"{metric} {_figure(value)} {asked}; the server's model {_figure(server)}.{note}"
    )


def _figure(value: float | None) -> str:
    return "not known" if value is None else f"{value:.4f}"
