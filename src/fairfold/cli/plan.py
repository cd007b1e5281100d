"""``fairfold plan``: what a device with so much memory gets, before anything is trained."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fairfold.cli.choose import Change, Data, Recipe, changes_of, choose

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fairfold.projections import Projection
    from fairfold.settings import Settings


def plan(
    items: Annotated[int | None, typer.Option(help="Rows of the table: the number of items.", min=1)] = None,
    dim: Annotated[int | None, typer.Option(help="Numbers per row (factors).", min=1)] = None,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="What a device may store: 64MB, 16x or 1/16; may be repeated, once per kind of device."),
    ] = None,
    data: Data = None,
    capacities: Annotated[str | None, typer.Option(help="With --data: sizes of the devices, e.g. 1x-4x-16x.")] = None,
    recipe: Recipe = None,
    change: Change = None,
    mapping: Annotated[
        str, typer.Option(help="element, chunk or ranked. Default: chunk if --chunk is above 1, else element.")
    ] = "",
    chunk: Annotated[int, typer.Option(help="How many neighbouring weights share one hash.", min=1)] = 1,
    batch: Annotated[int, typer.Option(help="Rows that are looked up at once.", min=1)] = 512,
    interactions: Annotated[int, typer.Option(help="Interactions that a device trains on in a round.", min=1)] = 1000,
    negatives: Annotated[int, typer.Option(help="Sampled items per interaction.", min=0)] = 4,
    item_bias: Annotated[
        bool, typer.Option("--item-bias", help="One number per item beside the table, held whole by every device.")
    ] = False,
    measure: Annotated[
        bool, typer.Option(help="Train one device of each size in a process of its own, and show its peak of memory.")
    ] = False,
) -> None:
    """Show what devices hold, how much memory they need and what they send, before anything is trained.

    Give a table by --items, --dim and --budget; or give --data, and see what `fairfold train` with the same options
    gives to every size.

    Examples:
        fairfold plan --items 1000000 --dim 64 --budget 16MB --budget 64x
        fairfold plan --data ratings.csv --capacities 1x-4x-16x
    """
    from fairfold.errors import InvalidSettings

    if data is not None:
        if items is not None or dim is not None or budget:
            raise InvalidSettings(
                "--data with --items, --dim or --budget",
                "one of them",
                "With --data give the sizes by --capacities, e.g. --capacities 1x-16x.",
            )
        _of_data(*choose(None, recipe, changes_of({"data": data, "capacities": capacities}, change or [])))
    elif items is None or dim is None or not budget:
        raise InvalidSettings(
            "neither --data nor --items, --dim and --budget",
            "what the devices are to hold",
            "Write fairfold plan --data ml-1m --capacities 1x-16x, or --items 1000000 --dim 64 --budget 16x.",
        )
    else:
        _of_table(items, dim, budget, mapping, chunk, batch, interactions, negatives, item_bias, measure)


def _of_data(settings: Settings, source: str) -> None:
    """What every size of a federation holds, receives and sends."""
    from rich.table import Table

    from fairfold.cli.console import Terminal
    from fairfold.runs.units import human_bytes
    from fairfold.simulate.world import World, load_data

    console, world = Terminal(), World.of(settings, load_data(settings)[0])
    console.say(source)
    known = world.plan
    cuts = [cut_of(held.projections or {}) for held in known.assignments(0)]
    table = Table(title=f"{settings.data.name}: what a device of each size gets")
    headings = ["devices", *cuts[0], "held", "received per round", "sent per round"]
    for heading in headings:
        table.add_column(heading, justify="right", overflow="fold")
    for size, (capacity, held) in enumerate(zip(known.capacities, known.assignments(0), strict=True)):
        traffic = known.algorithm.traffic(known, size) if held.projections is not None else (0, 0)
        cells = [str(capacity), *cuts[size].values(), human_bytes(held.bytes())]
        table.add_row(*cells, *map(human_bytes, traffic))
    console.print(table)
    if cuts[0]:
        whose = "its pairs" if settings.privacy.sums_alone else "the pairs of a usual history"
        console.say(f"Sent: {whose}, in the rounds in which a device says them. In a trial it sends 16 bytes.")
        console.say("Trials may choose another shape for the same bytes (docs/beyond.md); the end of a run says which.")


def cut_of(held: Mapping[str, Projection]) -> dict[str, str]:
    """Rows, columns, bits, pairs and neighbours that a device holds; nothing where models are not cut to bytes."""
    from fairfold.algorithms.pair_architecture import LISTED, NEAR, ROWS
    from fairfold.projections.coded import FACTORS, CodedRows

    rows = held.get(ROWS)
    if not isinstance(rows, CodedRows):
        return {}
    (many, wide), lists = rows.kept, {"pairs": LISTED, "neighbours": NEAR}
    beside = {word: f"{held[of].facts()['kept'][0]:,}" for word, of in lists.items() if of in held}
    table = {"rows": f"{many:,} of {rows.shape[0]:,}", "columns": str(wide - FACTORS), "bits": str(rows.bits)}
    return table | beside


def _of_table(
    items: int,
    dim: int,
    budget: list[str],
    mapping: str,
    chunk: int,
    batch: int,
    interactions: int,
    negatives: int,
    item_bias: bool,
    measure: bool,
) -> None:
    """What budgets hold of one table by FAIR, and what its training takes."""
    from rich.table import Table

    from fairfold.cli.console import Terminal
    from fairfold.errors import InvalidSettings
    from fairfold.methods import Tensors
    from fairfold.nn import footprint
    from fairfold.runs.units import human_bytes
    from fairfold.settings import read_settings
    from fairfold.subspace import Capacity
    from fairfold.values import BYTES, Shapes

    beside: Shapes = {"bias": (items, 1)} if item_bias else {}
    tensors, full = Tensors({"table": (items, dim)}, {}, beside), items * (dim + item_bias)
    rows = min(items, interactions * (1 + negatives))
    table = Table(
        title=f"{items:,} items of {dim} numbers: {human_bytes(BYTES * items * dim)} in full"
        f"{f', and a bias of {human_bytes(BYTES * items)}' if beside else ''}; "
        f"a round touches {rows:,} rows"
    )
    headings = ["budget", "size", "compression", "stored", "serving peak", "training peak", "per round, down + up"]
    for heading in [*headings, *(["measured peak"] if measure else [])]:
        table.add_column(heading, justify="right", overflow="fold")
    if item_bias and measure:
        raise InvalidSettings(
            "--measure with --item-bias",
            "one of them",
            "Leave out --item-bias: --measure trains a table without biases.",
        )
    chosen = {"mapping": mapping or "element"} if chunk == 1 else {"mapping": mapping or "chunk", "chunk": chunk}
    method = read_settings({"algorithm": {"kind": "gradient"}, "subspace": chosen}).subspace
    for text in budget:
        (held,) = method.assign(tensors, [Capacity.parse(text)], seed=0)
        needs = footprint.footprint(held.size(), dim + item_bias, batch, rows)
        cells = [text, f"{held.size():,}", f"{full / held.size():.4g}x"]
        cells += [human_bytes(part) for part in (needs.stored, needs.serving, needs.training)]
        cells.append(f"{human_bytes(needs.stored)} + {human_bytes(needs.stored)}")
        if measure:
            facts = (held.projections or {})["table"].facts()
            job = footprint.Job(items, dim, held.size(), facts["mapping"], facts["chunk"], batch, rows)
            cells.append(human_bytes(footprint.measure(job)))
        table.add_row(*cells)
    Terminal().print(table)
    typer.echo("Peaks are above an idle process (the interpreter and torch). Formula: docs/modules.md.")
