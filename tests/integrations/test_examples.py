import contextlib
import os
import re
import runpy
import sys
import tempfile
from pathlib import Path

import pytest

from packed_cases import write_texts
from rank_server import run_as_torchrun

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def data(tmp_path):
    """Files that the examples read: documents of very different lengths."""
    directory = tmp_path / "data"
    directory.mkdir()
    for index, text in enumerate(write_texts(tmp_path / "texts", num_documents=40, longest=400)):
        (directory / f"{index}.md").write_text(text * 40)
    return directory


@pytest.fixture
def run(capsys, monkeypatch):
    """Run an example in this process, which has imported torch already; gives what it prints."""

    def run_here(name, *arguments):
        monkeypatch.setattr(sys, "argv", [name, *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_here


def run_on_two_ranks(name, *arguments):
    with tempfile.TemporaryDirectory() as folder:
        run_as_torchrun(2, run_example, name, list(map(str, arguments)), folder)
        return (Path(folder) / "0.txt").read_text()


def run_example(name, arguments, folder):
    sys.argv = [name, *arguments]
    with (Path(folder) / f"{os.environ['RANK']}.txt").open("w") as file, contextlib.redirect_stdout(file):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")


def losses(output):
    return {int(step): float(loss) for step, loss in re.findall(r"step (\d+): loss ([\d.]+)", output)}


@pytest.mark.long
def test_the_plain_loop_learns_and_goes_on_with_other_ranks(data, tmp_path, run):
    whole = losses(run("plain_loop.py", "--data", data, "--steps", 4, "--output", tmp_path / "whole"))
    assert list(whole) == [1, 2, 3, 4]
    assert whole[4] < whole[1]
    first = losses(run_on_two_ranks("plain_loop.py", "--data", data, "--steps", 2, "--output", tmp_path / "parts"))
    rest = losses(run("plain_loop.py", "--data", data, "--steps", 4, "--output", tmp_path / "parts"))
    assert (list(first), list(rest)) == ([1, 2], [3, 4])
    for step, loss in (first | rest).items():
        assert loss == pytest.approx(whole[step], abs=2e-3)


def test_the_trainer_learns_evaluates_and_resumes(data, tmp_path, run):
    output = tmp_path / "trainer"
    text = run("hf_trainer.py", "--data", data, "--steps", 5, "--output", output)
    found = [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", text)]
    assert len(found) == 5
    assert found[-1] < found[0]
    assert "eval_loss" in text
    again = run("hf_trainer.py", "--data", data, "--steps", 6, "--output", output)
    assert len(re.findall(r"'loss': '?([\d.]+)", again)) == 1
    assert re.search(r"trained\s+\d+ documents", again)
