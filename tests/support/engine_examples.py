"""Examples of engines, run as ranks of torchrun."""

import contextlib
import os
import re
import runpy
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

from deepspeed_case import import_deepspeed
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


ENGINES = {
    "deepspeed_train.py": import_deepspeed,
    "megatron_train.py": partial(import_module, "megatron.core.models.gpt"),
    "trl_sft.py": partial(import_module, "trl.trainer.sft_trainer"),
}


def run_example(name, arguments, output):
    sys.argv = [name, *arguments]
    file = output.with_suffix(f".{os.environ['RANK']}.txt")
    with file.open("w") as text, contextlib.redirect_stdout(text):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def losses(world_size, name, data, output, steps, *more):
    """Train with an example; the loss that it prints of every step."""
    arguments = [*map(str, ("--data", data, "--steps", steps, "--output", output, *more))]
    forking_after(ENGINES.get(name, list), run_as_torchrun, world_size, run_example, name, arguments, output)
    result = re.findall(r"step:? *(\d+):? +loss:? +([\d.]+)", output.with_suffix(".0.txt").read_text())
    return {int(step): float(loss) for step, loss in result}
