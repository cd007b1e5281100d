"""Every method on every scheme of capacities, side by side in one report with the reference rows.

    FAIRFOLD_DATA=... python benchmarks/methods.py RUNS [--data goodreads-100] [--rounds 10] [--table FILE]

Each line is the command a user would type: ``fairfold train --recipe authors --data … --method … --capacities …``. A
scheme that a method cannot serve is refused before any work and stands in the table as N/A. Central training knows no
device sizes, so it runs once; its rounds are epochs over everybody's data, of which it needs fewer. Run again with the
same folder, the script goes on where it was.
"""

import argparse
import subprocess
import sys
from pathlib import Path

METHODS = ("fair", "fair_hom", "full_trn", "fedavg", "fedhm", "heterofl", "inconsistent")
SCHEMES = ("1x", "1x-2x", "1x-16x")
CENTRAL_ROUNDS = 4
FAIRFOLD = (str(Path(sys.executable).with_name("fairfold")),)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="folder for the runs and the report")
    parser.add_argument("--data", default="goodreads-100")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--table", type=Path, help="also write the report's table to this file")
    arguments = parser.parse_args()
    cases = [(method, scheme, arguments.rounds) for scheme in SCHEMES for method in METHODS]
    for method, scheme, rounds in [*cases, ("central", "1x", min(CENTRAL_ROUNDS, arguments.rounds))]:
        out = arguments.runs / f"{method}-{scheme}"
        if (out / "result.json").is_file():
            continue
        command = [*FAIRFOLD, "train", "--recipe", "authors", "--data", arguments.data, "--method", method]
        command += ["--capacities", scheme, "--rounds", str(rounds), "--seed", str(arguments.seed), "--out", str(out)]
        command += ["--set", "evaluate_every=2"] if method == "central" else []
        print(" ".join(["fairfold", *command[1:]]), flush=True)
        subprocess.run([*command, *(["--resume"] if out.is_dir() else [])], check=False)  # a refusal is a result
    report = [*FAIRFOLD, "report", str(arguments.runs), "--out", str(arguments.runs / "report")]
    found = subprocess.run(report, check=True, capture_output=True, text=True).stdout
    print(found)
    if arguments.table:
        arguments.table.write_text(found.split("Page:")[0].replace(f"{arguments.runs}/", ""))


if __name__ == "__main__":
    main()
