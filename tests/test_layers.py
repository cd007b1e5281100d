"""The layers of docs/architecture.md hold: a module imports from its own layer or from those above it, never below."""

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "fairfold"

# Top to bottom, as in docs/architecture.md. Folders on one line may not import each other.
LAYERS: list[set[str]] = [
    {"errors", "version"},
    {"files"},
    {"kernels"},
    {"subspace"},
    {"nn"},
    {"data"},
    {"metrics"},
    {"models"},
    {"federation"},
    {"algorithms"},
    {"simulate"},
    {"runs"},
    {"reproduce"},
    {"flower"},
    {"cli"},
]
RANK = {name: rank for rank, layer in enumerate(LAYERS) for name in layer}


def layer_of(path: Path) -> str:
    return path.relative_to(SOURCE).with_suffix("").parts[0]


def imported_layers(source: str, package: list[str]) -> set[str]:
    """Names of the fairfold layers a module's source imports, at any depth of nesting."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        modules: list[str] = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            prefix = ".".join([*base, *([node.module] if node.module else [])])
            modules = [f"{prefix}.{alias.name}" for alias in node.names]
        for module in modules:
            parts = module.split(".")
            if parts[0] == "fairfold" and len(parts) > 1 and parts[1] in RANK:
                found.add(parts[1])
    return found


def violations(path: Path) -> list[str]:
    own = layer_of(path)
    package = ["fairfold", *path.relative_to(SOURCE).parent.parts]
    return [
        f"{path.relative_to(SOURCE)} ({own}) imports {other}, which lies below it"
        for other in sorted(imported_layers(path.read_text(), package))
        if other != own and RANK[other] >= RANK[own]
    ]


def modules() -> list[Path]:
    return [path for path in sorted(SOURCE.rglob("*.py")) if path.parent != SOURCE or path.stem in RANK]


def test_every_folder_has_a_layer() -> None:
    unknown = {layer_of(path) for path in modules()} - set(RANK)
    assert not unknown, f"folders without a place in LAYERS: {unknown}"


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
    ],
)
def test_the_walker_sees_every_form_of_import(source: str) -> None:
    assert imported_layers(source, ["fairfold", "kernels"]) & {"subspace", "nn", "runs", "cli"}
