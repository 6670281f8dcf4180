"""Examples of engines on two processes: they learn, and go on where they stopped."""

import contextlib
import os
import re
import runpy
import sys
from pathlib import Path

import pytest

from packed_cases import write_texts
from rank_server import run_as_torchrun

EXAMPLES = Path(__file__).parents[2] / "examples" / "engines"


@pytest.fixture
def data(tmp_path):
    directory = tmp_path / "data"
    directory.mkdir()
    for index, text in enumerate(write_texts(tmp_path / "texts", num_documents=40, longest=400)):
        (directory / f"{index}.md").write_text(text * 40)
    return directory


def run_example(name, arguments, output):
    sys.argv = [name, *arguments]
    file = output.with_suffix(f".{os.environ['RANK']}.txt")
    with file.open("w") as text, contextlib.redirect_stdout(text):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def losses(world_size, name, data, output, steps, *more):
    arguments = ["--data", data, "--steps", steps, "--output", output, *more]
    run_as_torchrun(world_size, run_example, name, list(map(str, arguments)), output)
    found = re.findall(r"step (\d+): loss ([\d.]+)", output.with_suffix(".0.txt").read_text())
    return {int(step): float(loss) for step, loss in found}


@pytest.mark.long
def test_fsdp2_learns_and_goes_on_with_other_ranks(data, tmp_path):
    whole = losses(2, "fsdp2_train.py", data, tmp_path / "whole", 4)
    assert list(whole) == [1, 2, 3, 4]
    assert whole[4] < whole[1]
    first = losses(2, "fsdp2_train.py", data, tmp_path / "parts", 2)
    rest = losses(1, "fsdp2_train.py", data, tmp_path / "parts", 4)
    assert (list(first), list(rest)) == ([1, 2], [3, 4])
    for step, loss in (first | rest).items():
        assert loss == pytest.approx(whole[step], abs=2e-3)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "package", "ranks_after"),
    [
        ("accelerate_train.py", "accelerate", 1),
        ("deepspeed_train.py", "deepspeed", 2),
        ("megatron_train.py", "megatron.core", 1),
        ("trl_sft.py", "trl", 2),
    ],
)
def test_others_learn_and_go_on(data, tmp_path, name, package, ranks_after):
    """That their losses are those of plain training the conformance suite shows."""
    pytest.importorskip(package)
    first = losses(2, name, data, tmp_path / "run", 2)
    rest = losses(ranks_after, name, data, tmp_path / "run", 4)
    assert (list(first), list(rest)) == ([1, 2], [3, 4])
    assert rest[4] < rest[3] < first[1]
