"""Examples of engines, run as ranks of torchrun."""

import contextlib
import os
import re
import runpy
import sys
from pathlib import Path

from packed_cases import write_texts
from rank_server import forking_after, run_as_torchrun

EXAMPLES = Path(__file__).parents[2] / "examples" / "engines"


def write_pages(folder):
    """Markdown files of very different lengths, which the examples read; their folder."""
    directory = folder / "data"
    directory.mkdir()
    for index, text in enumerate(write_texts(folder / "texts", num_documents=40, longest=400)):
        (directory / f"{index}.md").write_text(text * 40)
    return directory


def import_trl():
    import trl.trainer.sft_trainer  # noqa: F401


def import_megatron():
    import megatron.core.models.gpt  # noqa: F401


def run_example(name, arguments, output):
    sys.argv = [name, *arguments]
    file = output.with_suffix(f".{os.environ['RANK']}.txt")
    with file.open("w") as text, contextlib.redirect_stdout(text):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def losses(world_size, name, data, output, steps, *more, prepare=list):
    """Train with an example, on ranks forked after `prepare`; the loss that it prints of every step."""
    arguments = ["--data", data, "--steps", steps, "--output", output, *more]
    words = list(map(str, arguments))
    forking_after(prepare, run_as_torchrun, world_size, run_example, name, words, output)
    result = re.findall(r"step:? *(\d+):? +loss:? +([\d.]+)", output.with_suffix(".0.txt").read_text())
    return {int(step): float(loss) for step, loss in result}
