"""The tables of docs/training.md that say what is tested together and what is refused, from tests/support/matrix.py.

python tools/make_matrix.py      writes them; tests/docs compares them with what is committed
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TARGET = ROOT / "docs" / "training.md"
BEGIN, END = "<!-- matrix: python tools/make_matrix.py -->\n\n", "<!-- end of matrix -->\n"


def matrix_tables() -> str:
    """Axes, refused pairs, and how many rows it takes."""
    if str(ROOT / "tests" / "support") not in sys.path:
        sys.path.insert(0, str(ROOT / "tests" / "support"))
    from matrix import ABSENCES, AXES, MEANINGS, REFUSALS, matrix_rows

    product = 1
    for values in AXES.values():
        product *= len(values)
    lines = ["| axis | what it is | values |", "|---|---|---|"]
    lines += [f"| {axis} | {MEANINGS[axis]} | {'; '.join(values)} |" for axis, values in AXES.items()]
    lines += ["", f"{len(matrix_rows())} plans instead of {product:,} hold every pair of values but these:", ""]
    lines += ["| refused at start | because |", "|---|---|"]
    lines += [f"| {rule.pairs} | {rule.reason} |" for rule in REFUSALS]
    lines += ["", "Not refused, but nothing to test: " + "; ".join(rule.why for rule in ABSENCES) + ".", ""]
    return "\n".join(lines) + "\n"


def page_with_tables() -> str:
    """docs/training.md as it should be."""
    before, _, rest = TARGET.read_text(encoding="utf-8").partition(BEGIN)
    assert END in rest, f"{TARGET} has no place for the tables between {BEGIN.strip()} and {END.strip()}"
    return before + BEGIN + matrix_tables() + END + rest.partition(END)[2]


if __name__ == "__main__":
    TARGET.write_text(page_with_tables(), encoding="utf-8")
