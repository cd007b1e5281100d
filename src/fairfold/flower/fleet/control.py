"""Runs one of Flower's programs with the server's secret in its requests: ``python -m fairfold.flower.fleet.control``.

Flower's endpoints for runs and keys ask for no credentials, and to start a run is to run code as the server. So the
gateway accepts such a request only with the secret of the server's folder, which only the server's account can read.
"""

import os
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fairfold.errors import InvalidState

HEADER = "fairfold-control"
VARIABLE = "FAIRFOLD_CONTROL"  # of the environment: the secret's file. The secret itself is in no one's environment.
SECRET_BYTES = 32


def read_secret(path: Path) -> str:
    """Read the secret of a server's folder."""
    try:
        secret = path.read_text(encoding="ascii").strip()
        if len(bytes.fromhex(secret)) != SECRET_BYTES:
            raise ValueError("not 64 hexadecimal digits")
    except (OSError, ValueError) as error:
        remedy = "Run this as the server's own account; the file is made by `fairfold server init`."
        raise InvalidState(f"{path}: {error}", "the secret of a server's folder", remedy) from None
    return secret


def control_command(program: str, *words: str) -> list[str]:
    """The command line of one of Flower's programs that sends the secret."""
    return [sys.executable, "-m", "fairfold.flower.fleet.control", program, *words]


def _popen(command: list[str], **options: Any) -> subprocess.Popen[bytes]:
    """Start what Flower starts by name, with the secret."""
    return subprocess.Popen(control_command(*command), **options)


def pass_on_to_superexec() -> None:
    """Let the SuperLink of this process start its SuperExec with the secret."""
    from flwr.superlink.cli import flower_superlink as _  # noqa: F401  the module's name is also that of a function

    module = sys.modules["flwr.superlink.cli.flower_superlink"]
    make_command: Any = vars(module)["_get_superexec_command"]
    vars(module).update(_get_superexec_command=lambda **facts: control_command(*make_command(**facts)))


def send_with_requests(secret: str) -> None:
    """Put the secret into every request that Flower's clients of this process send, and into what SuperExec starts."""
    from flwr.supercore.protobuf.client import ProtobufClient
    from flwr.supercore.superexec.executor import subprocess_executor

    send = ProtobufClient._send

    def send_with_secret(self: Any, context: Any, **options: Any) -> Any:
        context.request.headers[HEADER] = secret
        return send(self, context, **options)

    ProtobufClient._send = send_with_secret  # type: ignore[method-assign]
    vars(subprocess_executor).update(subprocess=SimpleNamespace(Popen=_popen, DEVNULL=subprocess.DEVNULL))


def main() -> None:
    """Run the program of Flower that the first argument names."""
    program, *words = sys.argv[1:]
    try:
        send_with_requests(read_secret(Path(os.environ.get(VARIABLE, ""))))
    except InvalidState as error:
        sys.exit(f"error: {error}")
    (entry,) = (one for one in entry_points(group="console_scripts", name=program) if one.value.startswith("flwr."))
    sys.argv = [program, *words]
    sys.exit(entry.load()())


if __name__ == "__main__":
    main()
