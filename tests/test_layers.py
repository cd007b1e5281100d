"""The layers of docs/architecture.md hold: a module imports from its own layer or from those above it, never below.

Imports for annotations alone (``TYPE_CHECKING``) do not count: they lead nowhere when the program runs.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fairfold"

# Top to bottom; names on one line may not import each other. A module with a line of its own is settled earlier than
# the rest of its package. docs/architecture.md shows these lines as a table: `python -m tests.test_layers` writes it.
LAYERS: list[tuple[set[str], str]] = [
    ({"errors", "typing"}, "one small tree of errors: what was given, what was needed, what to do"),
    ({"atomic_io"}, "files that are either whole or not there"),
    ({"checksums"}, "the one reader of what comes from a disk or a network: compared with its checksum before use"),
    (
        {"privacy.secure"},
        "secure aggregation: keys, masks, shares, and both sides as state machines; no torch, no Flower",
    ),
    (
        {"kernels"},
        "`hashing`: slot and sign; `reference`: the loops in plain torch, the specification; C and Triton bodies",
    ),
    ({"subspace"}, "S, nesting, capacities, and projections: what a device of a size holds of a tensor"),
    ({"nn"}, "PyTorch layers that store their compact vector alone"),
    ({"data"}, "readers, prepared data sets, splits, partitions, the synthetic world"),
    ({"metrics"}, "ranking and rating metrics, central baselines"),
    ({"models"}, "MF, NeuMF, MLP, LeNet"),
    ({"federation.plugins"}, "what a package or a file registers"),
    ({"config.tables"}, "frozen settings, inactive keys; `[data]`, `[model]`, `[run]`"),
    ({"federation.updates"}, "tasks, updates, aggregates, the server's state"),
    ({"privacy"}, "fixed-point encoding, noise, accounting, a client's ledger"),
    ({"methods"}, "which client holds what: FAIR, FedAvg, FedHM, HeteroFL, truncated models"),
    ({"config.fleet"}, "`[fleet]`, `[privacy]`"),
    ({"federation"}, "plan, clients, scheduling, aggregation, the round"),
    ({"algorithms"}, "what a client computes and what the server makes of the aggregate, one file or package each"),
    ({"backends"}, "how updates come about: sequential, batched, native, CUDA graph, ranks"),
    ({"config"}, "settings as a discriminated union; files, recipes"),
    ({"federation.federation"}, "a federation on one machine: data, clients, statistics"),
    ({"federation.evaluation"}, "quality by size of device, beside baselines"),
    ({"federation.simulation"}, "`simulate`: rounds, evaluations, early stopping"),
    ({"runs"}, "run folders, checkpoints, reports, exports, trackers, the watch page"),
    ({"estimator"}, "`fit`, `load`, `recommend`"),
    ({"privacy.audit"}, "attacks on what the server of a run could see"),
    ({"flower.protocol", "flower.local_data"}, "constants of messages, and a device's own file"),
    ({"device"}, "a small device in plain Python: no torch, no Flower, no numpy"),
    ({"flower"}, "the same rounds over a network; `flower.fleet`: server, node, gateway, enrolment"),
    ({"cli"}, "commands"),
    ({"__main__"}, "`python -m fairfold`"),
]
RANK = {name: rank for rank, (layer, _) in enumerate(LAYERS) for name in layer}


PAGE = Path(__file__).parents[1] / "docs" / "architecture.md"
HEADING = "| layer | what it holds |"


def table() -> str:
    """The layers as the page shows them."""
    rows = [f"| {', '.join(f'`{name}`' for name in sorted(names))} | {holds} |" for names, holds in LAYERS]
    return "\n".join([HEADING, "|---|---|", *rows])


def with_table(page: str) -> str:
    """A page in which the table of layers is that of LAYERS."""
    before, rest = page.split(HEADING)
    after = rest[rest.index("\n\n") :]
    return before + table() + after


def layer_of(module: str) -> str | None:
    """The layer of ``a.b.c``, below fairfold: that of the module if it has one, else of its folder."""
    parts = module.split(".")
    two = ".".join(parts[:2])
    return two if two in RANK else parts[0] if parts[0] in RANK else None


class _Imports(ast.NodeVisitor):
    """Names of what a module's source imports, at any depth of nesting."""

    def __init__(self, package: list[str]) -> None:
        self.package, self.found = package, set[str]()

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" not in ast.dump(node.test):
            self.generic_visit(node)
        for other in node.orelse:
            self.visit(other)

    def visit_Import(self, node: ast.Import) -> None:
        self._add(alias.name for alias in node.names)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        base = self.package[: len(self.package) - node.level + 1] if node.level else []
        prefix = ".".join([*base, *([node.module] if node.module else [])])
        self._add(f"{prefix}.{alias.name}" for alias in node.names)

    def _add(self, modules: Iterable[str]) -> None:
        self.found |= {module.removeprefix("fairfold.") for module in modules if module.startswith("fairfold.")}


def imported_layers(source: str, package: list[str]) -> set[str]:
    """Names of the fairfold layers a module's source imports."""
    imports = _Imports(package)
    imports.visit(ast.parse(source))
    return {layer for layer in map(layer_of, imports.found) if layer is not None}


def violations(path: Path) -> list[str]:
    inside = path.relative_to(SOURCE)
    own = layer_of(".".join(inside.with_suffix("").parts))
    assert own is not None, f"{inside} has no place in LAYERS"
    return [
        f"{inside} ({own}) imports {other}, which lies below it"
        for other in sorted(imported_layers(path.read_text(), ["fairfold", *inside.parent.parts]))
        if other != own and RANK[other] >= RANK[own]
    ]


def modules() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path != SOURCE / "__init__.py"]


def test_every_module_has_a_layer() -> None:
    names = [".".join(path.relative_to(SOURCE).with_suffix("").parts) for path in modules()]
    unknown = [name for name in names if layer_of(name) is None]
    assert not unknown, f"modules without a place in LAYERS: {unknown}"
    assert all(any(layer_of(name) == layer for name in names) for layer in RANK)  # nothing in LAYERS is gone


def test_the_page_has_this_table() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_table(page) == page, "run `python -m tests.test_layers`"


def test_no_layer_imports_from_one_below_it() -> None:
    found = [line for path in modules() for line in violations(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from fairfold.subspace import Subspace",
        "import fairfold.nn",
        "from ..runs import folder",
        "from fairfold import cli",
        "def f():\n    from fairfold.runs import train",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import fairfold.nn",
    ],
)
def test_the_walker_sees_every_form_of_import(source: str) -> None:
    assert imported_layers(source, ["fairfold", "kernels"]) & {"subspace", "nn", "runs", "cli"}


def test_annotations_do_not_count() -> None:
    assert not imported_layers("if TYPE_CHECKING:\n    from fairfold.runs import train", ["fairfold", "kernels"])
    assert imported_layers("from fairfold.config.tables import FrozenSettings", ["fairfold", "methods"]) == {
        "config.tables"
    }
    assert imported_layers("from fairfold.config import Settings", ["fairfold", "methods"]) == {"config"}


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
