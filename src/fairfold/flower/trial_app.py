"""What a federation on one machine runs, as the files of a Flower app, and the commands of a real one."""

CLIENT = '''"""What every device runs; its file, its capacity and its own folder come from --node-config."""

from fairfold.flower import make_client_app

app = make_client_app()
'''

SERVER = '''"""What the server runs."""

import json

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fairfold import Settings
from fairfold.flower import FairStrategy

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train what is left of the run."""
    options = dict(context.run_config)
    settings = Settings(**json.loads(options.pop("settings")))
    FairStrategy(settings, **options).start(grid)
'''

PYPROJECT = """[project]
name = "fairfold-trial"
version = "1.0.0"
description = "A federation made by `fairfold federate`"
license = { file = "LICENSE" }
dependencies = ["fairfold[flower]>=0.1", "flwr[simulation]>=1.41,<1.42"]

[tool.flwr.app]
publisher = "fairfold"
fab-format-version = 1
flwr-version-target = "1.41.0"

[tool.flwr.app.components]
serverapp = "fairfold_trial.server_app:app"
clientapp = "fairfold_trial.client_app:app"

[tool.flwr.app.config]
"""

COMMANDS = """On the server, whose name server.example.org the certificate must carry:
  python -m fairfold.flower.superlink --host 0.0.0.0 --port 8000 --ssl-ca-certfile ca.crt --ssl-certfile server.pem \\
    --ssl-keyfile server.key --enable-supernode-auth --database state.db
For every device, once:
  ssh-keygen -t ecdsa -b 384 -N "" -f device1                          (on the device: device1 never leaves it)
  flwr supernode register device1.pub mylink                           (on the server, with the public half)
On every device, under a supervisor that starts it again:
  flower-supernode --superlink server.example.org:8000 --root-certificates ca.crt \\
    --auth-supernode-private-key device1 --node-config 'capacity="40MB" data="mine.csv" state="/var/lib/fairfold"'
To train, on the server, whose ~/.flwr/config.toml has [superlink.mylink] with address and root-certificates:
  flwr run examples/flower mylink --stream"""
