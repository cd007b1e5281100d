"""The Flower app of a server: its files, and what its ServerApp runs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

if TYPE_CHECKING:
    from collections.abc import Mapping

    from flwr.serverapp import Grid

PACKAGE = "fairfold_app"

CLIENT = '''"""For devices that run Flower's own SuperNode; those of `fairfold node start` have an app of their own."""

from fairfold.flower import make_client_app

app = make_client_app()
'''

SERVER = '''"""What the server runs."""

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fairfold.flower.training import train

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train what is left of the run."""
    train(grid, context.run_config)
'''

# Flower asks for itself here, and never installs itself. Any other dependency it might ask an index for, where anybody
# could have taken the name.
PYPROJECT = f"""[project]
name = "fairfold-app"
version = "1.0.0"
description = "The federation of a fairfold server"
license = {{ file = "LICENSE" }}
dependencies = ["flwr>=1.41,<1.42"]

[tool.flwr.app]
publisher = "fairfold"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "{PACKAGE}.server_app:app"
clientapp = "{PACKAGE}.client_app:app"

[tool.flwr.app.config]
"""


def write_app(app: Path, server: Path) -> None:
    """Write the app of the server in a folder; how a run is to go comes with the run."""
    (app / PACKAGE).mkdir(parents=True)
    (app / PACKAGE / "__init__.py").write_text("")
    (app / PACKAGE / "client_app.py").write_text(CLIENT)
    (app / PACKAGE / "server_app.py").write_text(SERVER)
    (app / "LICENSE").write_text("Made by fairfold; do with it what you like.\n")
    config = {"server": str(server), "rounds": 0, "resume": False}
    (app / "pyproject.toml").write_text(PYPROJECT + tomli_w.dumps(config))


def train(grid: Grid, options: Mapping[str, Any]) -> None:
    """Train the model of the server in ``options["server"]``; called by its ServerApp."""
    from fairfold.flower.server import ServerFolder
    from fairfold.flower.strategy import FairStrategy

    server = ServerFolder.open(Path(str(options["server"])))
    settings, resume = server.settings(int(options["rounds"])), bool(options["resume"])
    FairStrategy(settings, server.items, folder=server.run, resume=resume, **server.rounds).start(grid)
