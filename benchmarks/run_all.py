"""`make bench`: every measured benchmark, rows appended to benchmarks/results. Wants a quiet machine.

python benchmarks/run_all.py [--quick]      --quick tries every benchmark with small inputs and appends nothing
"""

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
MEASURED = (
    *("simulator", "planning", "replay", "recurrent", "trees", "dp_merge", "reduction", "context_parallel"),
    *("swinging", "reconfigure", "engine_steps", "loader", "loader_training"),
)
"""The others are simulated (`paper_*`, `planners`, `ablation`), exact, or of a machine of their own (`gpu_*`)."""


def main() -> None:
    """All of them, one after the other; the demo's comparison where `make demo` has ended."""
    option = "--quick" if "--quick" in sys.argv[1:] else "--append"
    demo = ("demo",) if (HERE.parent / "runs" / "demo" / "bench.json").is_file() else ()
    codes = [
        subprocess.run([sys.executable, HERE / f"{name}.py", option], check=False).returncode
        for name in (*MEASURED, *demo)
    ]
    sys.exit(any(codes))


if __name__ == "__main__":
    main()
