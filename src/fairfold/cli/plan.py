"""``fairfold plan``: what a device with so much memory gets, before anything is trained."""

from typing import Annotated

import typer


def plan(
    items: Annotated[int, typer.Option(help="Rows of the table.", min=1)],
    dim: Annotated[int, typer.Option(help="Numbers per row (factors).", min=1)],
    budget: Annotated[
        list[str],
        typer.Option(help="What a device may store: 64MB, 16x or 1/16. Give it again for each kind of device."),
    ],
    mapping: Annotated[str, typer.Option(help="element, chunk or ranked; left out, by the chunk.")] = "",
    chunk: Annotated[int, typer.Option(help="Neighbouring weights that share one hash.", min=1)] = 1,
    batch: Annotated[int, typer.Option(help="Rows looked up at once.", min=1)] = 512,
    interactions: Annotated[int, typer.Option(help="Interactions a device trains on in a round.", min=1)] = 1000,
    negatives: Annotated[int, typer.Option(help="Sampled items per interaction.", min=0)] = 4,
    item_bias: Annotated[
        bool, typer.Option("--item-bias", help="One number per item beside the table, held whole by every device.")
    ] = False,
    measure: Annotated[bool, typer.Option(help="Train one device of each size in a process; show its peak.")] = False,
) -> None:
    """Show the size, memory and traffic of devices, one line per budget."""
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
        raise InvalidSettings("--measure with --item-bias", "one of them", "What is measured is a table alone.")
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
