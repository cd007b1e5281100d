"""Build the small wheel ``fairfold-device``: ``python deploy/device_wheel.py dist [WHEEL]``.

It has those of fairfold's files that a small device imports, and nothing else (docs/decisions/device-wheel.md). The C
library of devices comes out of a wheel of fairfold, where one is named, else from this environment.
"""

import base64
import hashlib
import subprocess
import sys
import sysconfig
import zipfile
from importlib import metadata
from pathlib import Path

ROOTS = (
    "fairfold.flower.fleet.device_command", "fairfold.flower.fleet.node", "fairfold.flower.fleet.node_loop",
    "fairfold.flower.fleet.credentials", "fairfold.flower.roster", "fairfold.flower.local_data",
    "fairfold.privacy.secure.folder", "fairfold.privacy.secure.client", "fairfold.privacy.secure.keys",
    "fairfold.privacy.ledger",
)  # fmt: skip
PACKAGE = Path(__file__).parents[1] / "src" / "fairfold" / "device"
PARTS = tuple(
    f"fairfold.device.{path.stem}" for path in sorted(PACKAGE.glob("[!_]*.py"))
)  # some are imported when a task comes
LIST = f"import sys; [__import__(name) for name in {ROOTS + PARTS}]; import fairfold.device.native as native\n"
LIST += (
    "for name, one in sys.modules.items():\n    if name.partition('.')[0] == 'fairfold': print(name, one.__file__)\n"
)
LIST += "print('library', native.library()._name if native.library() else '')"
NEEDED = ("cryptography", "tomli_w")
LIBRARY = "fairfold/device/fairfold_device.so"
ABOUT = """Metadata-Version: 2.1
Name: fairfold-device
Summary: A small device of a fairfold fleet: federated recommender systems in 40 MB, without PyTorch
License: Apache-2.0
Requires-Python: >=3.11
Description-Content-Type: text/markdown
"""
TEXT = """
The part of fairfold that a device of a fleet needs: it trains in plain Python, and recommends without a server.

    fairfold-device enrol TOKEN --server server.example.org:8000 --data mine.csv --capacity 4x
    fairfold-device start
    fairfold-device recommend --user 17

Install it without fairfold, or fairfold without it: the two have files in common.
"""


def files() -> dict[str, bytes]:
    """The files of the package by their path in the wheel."""
    found = dict[str, bytes]()
    listed = subprocess.run([sys.executable, "-c", LIST], capture_output=True, text=True, check=True).stdout
    for line in listed.splitlines():
        name, _, path = line.partition(" ")
        if name == "library":
            if path:
                found[LIBRARY] = Path(path).read_bytes()
            continue
        inside = name.replace(".", "/") + ("/__init__" if Path(path).name == "__init__.py" else "")
        found[f"{inside}.py"] = Path(path).read_bytes()
    return found


def build(folder: Path, wheel_with_library: Path | None = None) -> Path:
    """Write the wheel into a folder; returns its path."""
    version, content = metadata.version("fairfold"), files()
    if wheel_with_library is not None:
        with zipfile.ZipFile(wheel_with_library) as other:
            content[LIBRARY] = other.read(LIBRARY)
    requires = [one.partition(";")[0].strip() for one in metadata.requires("fairfold") or ()]
    chosen = sorted({one for one in requires if one.replace("-", "_").startswith(NEEDED)})
    platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
    is_native = LIBRARY in content
    tag = f"py3-none-{platform if is_native else 'any'}"
    info = f"fairfold_device-{version}.dist-info"
    requirements = "".join(f"Requires-Dist: {one}\n" for one in chosen)
    content[f"{info}/METADATA"] = f"{ABOUT}Version: {version}\n{requirements}{TEXT}".encode()
    pure = f"Root-Is-Purelib: {str(not is_native).lower()}"
    content[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: device_wheel\n{pure}\nTag: {tag}\n".encode()
    content[f"{info}/entry_points.txt"] = (
        b"[console_scripts]\nfairfold-device = fairfold.flower.fleet.device_command:main\n"
    )
    lines = [f"{name},sha256={_digest(data)},{len(data)}" for name, data in content.items()]
    content[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,", ""]).encode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"fairfold_device-{version}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, data in content.items():
            wheel.writestr(name, data)
    return path


def _digest(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


if __name__ == "__main__":
    sys.stdout.write(f"{build(*map(Path, sys.argv[1:]))}\n")
