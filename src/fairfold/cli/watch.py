"""``fairfold watch``: a run as a page that goes along with it."""

from pathlib import Path
from typing import Annotated

import typer

from fairfold.cli.console import Terminal


def watch(
    run: Annotated[Path, typer.Argument(help="Folder of a run, or of a fleet's server.")],
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port to listen on; 0 takes any free one.")] = 8050,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Any other than that of this machine alone needs --token.")
    ] = ("127.0.0.1"),
    token: Annotated[
        str | None, typer.Option(envvar="FAIRFOLD_WATCH_TOKEN", help="Word that the page asks for.")
    ] = None,
) -> None:
    """Show a run in a browser while it goes: rounds, quality per size, devices, who was left out and why, bytes.

    Only the run's folder is read, and nothing is written. Of a server also who is connected is shown, and its run as
    soon as there is one. /metrics has the figures for Prometheus, /status.json has all of them.

    Examples:
        fairfold watch runs/first
        fairfold watch fleet
    """
    import asyncio

    from fairfold.errors import InvalidSettings
    from fairfold.flower.processes import listening
    from fairfold.flower.server import FILE as SERVER
    from fairfold.flower.server import ServerFolder
    from fairfold.runs.read import require_run
    from fairfold.watch.app import LOOPBACK, watching
    from fairfold.watch.told import Watched

    try:
        import uvicorn
    except ImportError:
        raise InvalidSettings(
            "`fairfold watch`, which needs uvicorn", "the extra 'flower'", "pip install 'fairfold[flower]'"
        ) from None
    server = ServerFolder.open(run) if (run / SERVER).is_file() else None
    if server is None:
        require_run(run)
    if host not in LOOPBACK and not token:
        raise InvalidSettings(
            f"--host {host} without a token",
            "--token",
            "Add --token with a long random word, and put TLS before the page.",
        )
    console = Terminal()
    watched = Watched(run) if server is None else Watched(server.run, server.devices)
    app = watching(watched, token or None)
    config = uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off")
    with listening(host, port, "End it, or name another with --port; 0 takes any free one.") as mine:
        name = f"[{host}]" if ":" in host else host
        console.say(f"http://{name}:{mine.getsockname()[1]}/ shows {run}; Ctrl-C ends it.")
        asyncio.run(uvicorn.Server(config).serve(sockets=[mine]))
