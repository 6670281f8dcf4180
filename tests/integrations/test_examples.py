"""The examples: they learn, and go on where they stopped as if they had not."""

import re
import runpy
import sys
from pathlib import Path

import msgspec
import pytest

from engine_examples import losses, write_pages
from evenload.config.train_config import layout_of, load_train_config
from evenload.data.hub import model_from
from evenload.runtime.model.model_config import load_config, model_spec
from evenload.types.model import MODELS

EXAMPLES = Path(__file__).parents[2] / "examples"


def test_the_trainer_learns_evaluates_and_resumes(tmp_path, monkeypatch, capsys):
    output, data = tmp_path / "trainer", write_pages(tmp_path)

    def run(steps):
        """In this process, which has imported torch already."""
        arguments = ["--data", data, "--steps", steps, "--output", output]
        monkeypatch.setattr(sys, "argv", ["hf_trainer.py", *map(str, arguments)])
        runpy.run_path(str(EXAMPLES / "hf_trainer.py"), run_name="__main__")
        text = capsys.readouterr().out
        return text, [float(loss) for loss in re.findall(r"'loss': '?([\d.]+)", text)]

    text, result = run(5)
    assert len(result) == 5
    assert result[-1] < result[0]
    assert "eval_loss" in text
    again, rest = run(6)
    assert len(rest) == 1
    assert re.search(r"trained\s+\d+ documents", again)


@pytest.mark.parametrize(
    ("name", "arguments", "figure", "grows"),
    [
        ("dpo.py", ["--steps", "4", "--pairs", "6"], r"loss ([\d.]+)", False),
        ("grpo.py", ["--steps", "5", "--prompts", "4"], r"reward ([\d.]+)", True),
    ],
)
def test_a_loop_with_shared_prefixes_learns(name, arguments, figure, grows, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, *arguments])
    runpy.run_path(str(EXAMPLES / name), run_name="__main__")
    text = capsys.readouterr().out
    values = [float(value) for value in re.findall(figure, text)]
    assert len(values) == int(arguments[1])
    assert (values[-1] - values[0]) * (1 if grows else -1) > 0.05
    for unique, paths in re.findall(r"([\d,]+) tokens for ([\d,]+) of paths", text):
        assert int(unique.replace(",", "")) < 0.7 * int(paths.replace(",", ""))


SHARED = ("--sequence-ranks", 2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "package", "ranks_after", "before"),
    [
        ("../plain_loop.py", "torch", 1, ()),
        ("fsdp2_train.py", "torch", 1, ()),
        ("accelerate_train.py", "accelerate", 1, ()),
        ("deepspeed_train.py", "deepspeed", 2, SHARED),
        ("megatron_train.py", "megatron.core", 1, ()),
        ("trl_sft.py", "trl", 2, ()),
    ],
    ids=["plain", "fsdp2", "accelerate", "deepspeed", "megatron", "trl"],
)
def test_an_example_learns_and_goes_on_as_if_it_had_not_stopped(tmp_path, name, package, ranks_after, before):
    """Steps after the checkpoint have the losses of a run that never stopped; DeepSpeed's has ranks that share packs
    before it, and none after it and in the whole run."""
    pytest.importorskip(package)
    data = write_pages(tmp_path)
    whole = losses(2, name, data, tmp_path / "whole", 4)
    assert list(whole) == [1, 2, 3, 4]
    assert whole[4] < whole[1]
    first = losses(2, name, data, tmp_path / "parts", 2, *before)
    rest = losses(ranks_after, name, data, tmp_path / "parts", 4)
    assert (list(first), list(rest)) == ([1, 2], [3, 4])
    for step, loss in (first | rest).items():
        assert loss == pytest.approx(whole[step], abs=2e-3)


@pytest.mark.parametrize("name", ["gpt-3.35b", "gpt-13b"])
def test_the_example_models_are_the_planned_ones(name: str) -> None:
    file = EXAMPLES / "flexpipe" / f"{name}.json"
    assert msgspec.structs.replace(model_from(str(file)), name=name) == MODELS[name]
    assert load_config(str(file)).num_hidden_layers == MODELS[name].num_layers, "and nothing refuses to train it"


def test_its_configuration_is_complete_but_for_data() -> None:
    folder = EXAMPLES / "flexpipe"
    settings = ["data.sources=['docs']", f"model.path={folder / 'gpt-3.35b.json'}"]
    config = load_train_config(folder / "train.toml", settings)
    model = model_spec(config)
    assert model.position_rows == config.data.max_document_tokens
    assert layout_of(config.parallel, model.num_layers).world_size == 16
