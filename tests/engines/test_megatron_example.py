"""The example for GPUs, run on CPU processes by the tests' shim: it learns, and goes on where it stopped."""

import contextlib
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("megatron.core", reason="megatron-core is not installed")

from megatron_shim import megatron_on_cpu
from packed_cases import write_texts
from rank_server import run_as_torchrun

EXAMPLE = Path(__file__).parents[2] / "examples" / "engines" / "megatron_train.py"


def run_example(arguments, output):
    sys.argv = [EXAMPLE.name, *arguments]
    file = output.with_suffix(f".{os.environ['RANK']}.txt")
    with megatron_on_cpu(), file.open("w") as text, contextlib.redirect_stdout(text):
        runpy.run_path(str(EXAMPLE), run_name="__main__")


def losses(data, output, steps):
    arguments = ["--data", data, "--steps", steps, "--output", output, "--pipeline", 2, "--max-tokens", 512]
    run_as_torchrun(2, run_example, list(map(str, arguments)), output)
    found = re.findall(r"step (\d+): loss ([\d.]+)", output.with_suffix(".0.txt").read_text())
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.long
def test_it_learns_and_goes_on(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    for index, text in enumerate(write_texts(tmp_path / "texts", num_documents=40, longest=400)):
        (data / f"{index}.md").write_text(text * 20)
    first = losses(data, tmp_path / "run", 3)
    rest = losses(data, tmp_path / "run", 6)
    assert (list(first), list(rest)) == ([1, 2, 3], [4, 5, 6])
    assert rest[6] < first[1]
