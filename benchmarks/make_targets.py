"""How long a target of the Makefile takes where its installation is there already: what README.md says of `make demo`.

python benchmarks/make_targets.py demo [--append]      wants a quiet machine; rows of benchmark "make"
"""

import argparse
import subprocess
import time
from pathlib import Path

from results import Row, append_rows

ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Each target named, once."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="+", help="demo, test, ...")
    parser.add_argument("--checkout", type=Path, default=ROOT, help="where it is made (default: this one)")
    parser.add_argument("--append", action="store_true", help="append the rows to benchmarks/results/results.csv")
    options = parser.parse_args()
    rows = []
    for target in options.target:
        began = time.perf_counter()
        subprocess.run(["make", target], cwd=options.checkout, check=True)
        rows.append(Row("make", target, "wall time", time.perf_counter() - began, "s", ""))
        print(f"make {target}: {rows[-1].value:.0f} s")
    if options.append:
        append_rows(rows)


if __name__ == "__main__":
    main()
