"""The layers of docs/architecture.md hold: a module imports from its own layer or from those above it, never below.

Imports for annotations alone (``TYPE_CHECKING``) do not count: they lead nowhere when the program runs.
"""

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fairfold"

# Top to bottom, as in docs/architecture.md. Names on one line may not import each other. What is settled early of a
# folder has a line of its own: the base of all settings, plain tables, and what others may register.
LAYERS: list[set[str]] = [
    {"errors", "version", "values"},
    {"files"},
    {"sealed"},
    {"secure"},
    {"kernels"},
    {"subspace"},
    {"nn"},
    {"data"},
    {"metrics"},
    {"models"},
    {"settings.base", "projections"},
    {"protocol.words"},
    {"privacy"},
    {"protocol.plugins", "methods"},
    {"settings.pace"},
    {"settings.parts", "settings.privacy"},
    {"protocol"},
    {"algorithms"},
    {"backends"},
    {"settings"},
    {"trackers"},
    {"simulate"},
    {"runs"},
    {"fitting"},
    {"audit"},
    {"reproduce"},
    {"watch"},
    {"flower"},
    {"cli"},
    {"__main__"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


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


def test_no_layer_imports_from_one_below_it() -> None:
    found = [line for path in modules() for line in violations(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "source",
    [
        "from fairfold.subspace import Subspace",
        "import fairfold.nn",
        "from ..runs import settings",
        "from fairfold import cli",
        "def f():\n    from fairfold.runs import train",
        "if TYPE_CHECKING:\n    pass\nelse:\n    import fairfold.nn",
    ],
)
def test_the_walker_sees_every_form_of_import(source: str) -> None:
    assert imported_layers(source, ["fairfold", "kernels"]) & {"subspace", "nn", "runs", "cli"}


def test_annotations_do_not_count() -> None:
    assert not imported_layers("if TYPE_CHECKING:\n    from fairfold.runs import train", ["fairfold", "kernels"])
    assert imported_layers("from fairfold.settings.base import Frozen", ["fairfold", "methods"]) == {"settings.base"}
    assert imported_layers("from fairfold.settings import Settings", ["fairfold", "methods"]) == {"settings"}
