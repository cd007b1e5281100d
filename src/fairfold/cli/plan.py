"""``fairfold recipes`` and ``fairfold plan``: the settings that come with fairfold, and what devices get of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from fairfold.cli.console import Terminal, make_table
from fairfold.cli.options import Change, Data, Plugin, Recipe, collect_changes, resolve_settings

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fairfold.cli.options import ResolvedSettings
    from fairfold.config import Settings
    from fairfold.subspace.projection import Projection
UPDATES = {"gradient": "local SGD", "closed_form": "closed form", "co_occurrence": "co-occurrence"}
"""What clients compute, by algorithm; others go by their names."""


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
    plugin: Plugin = None,  # noqa: ARG001 (its callback loads it)
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
            remedy = "With --data give the sizes by --capacities, e.g. --capacities 1x-16x."
            raise InvalidSettings("--data with --items, --dim or --budget", "one of them", remedy)
        changes = collect_changes({"data": data, "capacities": capacities}, change or [])
        _plan_federation(resolve_settings(None, recipe, changes))
        return
    if items is None or dim is None or not budget:
        remedy = "Write fairfold plan --data ml-1m --capacities 1x-16x, or --items 1000000 --dim 64 --budget 16x."
        raise InvalidSettings("neither --data nor --items, --dim and --budget", "what the devices are to hold", remedy)
    if item_bias and measure:
        remedy = "Leave out --item-bias: --measure trains a table without biases."
        raise InvalidSettings("--measure with --item-bias", "one of them", remedy)
    from fairfold.cli.console import Terminal, make_table
    from fairfold.config import read_settings
    from fairfold.methods import Tensors
    from fairfold.nn import footprint
    from fairfold.runs.units import human_bytes
    from fairfold.subspace import Capacity
    from fairfold.typing import FLOAT_BYTES, Shapes

    biases: Shapes = {"bias": (items, 1)} if item_bias else {}
    tensors = Tensors({"table": (items, dim)}, {}, biases)
    full = items * (dim + item_bias)
    rows = min(items, interactions * (1 + negatives))
    title = (
        f"{items:,} items of {dim} numbers: {human_bytes(FLOAT_BYTES * items * dim)} in full"
        f"{f', and a bias of {human_bytes(FLOAT_BYTES * items)}' if biases else ''}; "
        f"a round touches {rows:,} rows"
    )
    headings = ["budget", "size", "compression", "stored", "serving peak", "training peak", "per round, down + up"]
    table = make_table([], [*headings, *(["measured peak"] if measure else [])], title=title)
    chosen = {"mapping": mapping or "element"} if chunk == 1 else {"mapping": mapping or "chunk", "chunk": chunk}
    method = read_settings({"algorithm": {"kind": "gradient"}, "subspace": chosen}).subspace
    for text in budget:
        (held,) = method.assign(tensors, [Capacity.parse(text)], seed=0)
        needs = footprint.footprint(held.size(), dim + item_bias, batch, rows)
        cells = [text, f"{held.size():,}", f"{full / held.size():.4g}x"]
        cells += [human_bytes(part) for part in (needs.stored, needs.serving, needs.training)]
        cells.append(f"{human_bytes(needs.stored)} + {human_bytes(needs.stored)}")
        if measure:
            facts = (held.projections or {})["table"].description()
            job = footprint.FootprintJob(items, dim, held.size(), facts["mapping"], facts["chunk"], batch, rows)
            cells.append(human_bytes(footprint.measure(job)))
        table.add_row(*cells)
    Terminal().print(table)
    typer.echo("Peaks are above an idle process (the interpreter and torch). Formula: docs/modules.md.")


def _plan_federation(resolved: ResolvedSettings) -> None:
    """Print what a device of every size holds, receives and sends in a federation."""
    from fairfold.cli.console import Terminal, make_table
    from fairfold.federation.federation import load_federation
    from fairfold.runs.units import human_bytes

    console = Terminal()
    settings = resolved.settings
    federation = load_federation(settings)[0]
    console.echo(resolved.source)
    plan = federation.plan
    shapes = [describe_truncation(held.projections or {}) for held in plan.assignments(0)]
    headings = ["devices", *shapes[0], "held", "received per round", "sent per round"]
    table = make_table([], headings, title=f"{settings.data.name}: what a device of each size gets")
    for size, (capacity, held) in enumerate(zip(plan.capacities, plan.assignments(0), strict=True)):
        traffic = plan.algorithm.traffic(plan, size) if held.projections is not None else (0, 0)
        cells = [str(capacity), *shapes[size].values(), human_bytes(held.bytes())]
        table.add_row(*cells, *map(human_bytes, traffic))
    console.print(table)
    if shapes[0]:
        whose = "its pairs" if settings.privacy.uses_secure_aggregation else "the pairs of a usual history"
        console.echo(f"Sent: {whose}, in the rounds in which a device uploads them. A tuning round takes 16 bytes.")
        console.echo(
            "Tuning may choose another shape for the same bytes (docs/default-recommender.md): reports show it."
        )


def describe_truncation(held: Mapping[str, Projection]) -> dict[str, str]:
    """Rows, columns, bits, pairs and neighbors that a device holds of a truncated model; else nothing."""
    from fairfold.algorithms.cooccurrence.scorer import NEIGHBORS, PAIRS, ROWS
    from fairfold.subspace.packed import FACTORS, QuantizedRows

    rows = held.get(ROWS)
    if not isinstance(rows, QuantizedRows):
        return {}
    num_rows, width = rows.kept
    lists = {"pairs": PAIRS, "neighbors": NEIGHBORS}
    lengths = {name: f"{held[of].description()['kept'][0]:,}" for name, of in lists.items() if of in held}
    shape = {"rows": f"{num_rows:,} of {rows.shape[0]:,}", "columns": str(width - FACTORS), "bits": str(rows.bits)}
    return shape | lengths


def recipes() -> None:
    """List the recipes: what devices hold, what they compute, and what each is for.

    A recipe is a subspace (hashed, ranked or truncated tables) with an update that adds up over devices. `fairfold
    train --recipe fair --show-settings` shows all settings of one.

    Examples:
        fairfold recipes
    """
    from fairfold.config.files import DEFAULT_RECIPE, load_settings, recipe_summary
    from fairfold.config.files import recipes as known

    console = Terminal()
    table = make_table(["recipe", "subspace", "update", "what it is"], [])
    for name in sorted(known(), key=lambda name: (name != DEFAULT_RECIPE, name)):
        settings = load_settings(None, {}, name)
        update = UPDATES.get(settings.algorithm.kind, settings.algorithm.kind)
        table.add_row(name, subspace_of(settings), update, recipe_summary(name))
    console.print(table)
    console.echo("Use one with --recipe NAME (train, federate, server init, plan), or fit(recipe=NAME).")


def subspace_of(settings: Settings) -> str:
    """What devices hold, in a word: ranked, hashed or truncated tables."""
    from fairfold.methods import Fair

    method = settings.subspace
    return ("ranked" if method.ranked else "hashed") if isinstance(method, Fair) else method.method
