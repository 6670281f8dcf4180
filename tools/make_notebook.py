"""Runs the cells of examples/lengths_to_packs.ipynb and stores what they print in it.

python tools/make_notebook.py        part of `make docs`; a quarter of a minute. A test fails when the outputs differ.
"""

import contextlib
import io
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NOTEBOOK = ROOT / "examples" / "lengths_to_packs.ipynb"


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with what its code cells print, run in order in one session."""
    session: dict[str, Any] = {}
    cells = []
    with readers_folder():
        for cell in notebook["cells"]:
            if cell["cell_type"] == "code":
                printed = io.StringIO()
                with contextlib.redirect_stdout(printed):
                    exec("".join(cell["source"]), session)
                lines = printed.getvalue().splitlines(keepends=True)
                stream = [{"name": "stdout", "output_type": "stream", "text": lines}] if lines else []
                cell = cell | {"execution_count": None, "outputs": stream}
            cells.append(cell)
    return notebook | {"cells": cells}


@contextlib.contextmanager
def readers_folder() -> Iterator[None]:
    """A fresh clone as Jupyter opens the notebook in it: the work folder is examples/. It is thrown away."""
    before = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        examples = Path(folder) / "examples"
        examples.mkdir()
        for file in (ROOT / "examples").iterdir():
            (examples / file.name).symlink_to(file)
        os.chdir(examples)
        try:
            yield
        finally:
            os.chdir(before)


def text_of(notebook: dict[str, Any]) -> str:
    """As the file has it."""
    return json.dumps(notebook, indent=1, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    NOTEBOOK.write_text(text_of(executed(json.loads(NOTEBOOK.read_text(encoding="utf-8")))), encoding="utf-8")
