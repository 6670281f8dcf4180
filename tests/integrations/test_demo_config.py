"""The demo: its configuration is one that `evenload train` takes, and its result says what its repeats support."""

import json
import runpy
from pathlib import Path

import msgspec
import pytest

from bench_samples import batch_run, result_of, runs
from evenload.bench.results import MachineLoad
from evenload.config.train_config import layout_of, load_train_config
from evenload.runtime.model.model_config import model_spec

ROOT = Path(__file__).parents[2]


def test_the_demo_fills_its_configuration_in(tmp_path, monkeypatch: pytest.MonkeyPatch):
    """Sources and tokeniser of this machine, all else as it stands in demo.toml; both strategies are compared."""
    monkeypatch.chdir(ROOT)
    demo = runpy.run_path(str(ROOT / "examples" / "stdlib_demo" / "run.py"))
    library = tmp_path / 'a "library"'
    library.mkdir()
    for index in range(20):
        (library / f"{index}.py").write_text(f"def function_{index}(first, second):\n    return first + {index}\n" * 50)
    demo["library_sources"].__globals__["library_sources"] = lambda: [str(library)]
    config = load_train_config(demo["write_config"](tmp_path / "config.toml"), [])
    assert list(config.data.sources) == [str(library)]
    assert Path(config.data.tokenizer).is_file()
    assert config.plan.strategy == demo["STRATEGIES"][1]
    assert layout_of(config.parallel, model_spec(config).num_layers).world_size == 2
    as_it_stands = load_train_config(ROOT / "examples" / "stdlib_demo" / "demo.toml", ["data.sources=['docs']"])
    assert (config.model, config.parallel, config.train) == (
        as_it_stands.model, as_it_stands.parallel, as_it_stands.train,
    )  # fmt: skip


QUIET, NOISY = ((1.3, 1.31, 1.3), (1.0, 1.01, 1.0)), ((1.0, 1.6, 1.1), (1.4, 0.9, 1.0))


@pytest.mark.parametrize(
    ("measured", "waited_share", "first", "second", "trained"),
    [
        (QUIET, 0.0, "best_fit takes 1.30 times as long as slimpack (95 % interval 1.", "2 of 2", "the faster one"),
        (QUIET[::-1], 0.0, "slimpack takes 1.30 times as long as best_fit", "0 of 2", "best_fit (the faster one)"),
        (NOISY, 0.0, "this machine is too noisy to tell: best_fit takes 0.", "too busy", "slimpack (as configured)"),
        (QUIET, 0.35, "35% of the time.", "this machine was too busy to hold", "slimpack (the faster one)"),
    ],
    ids=["quiet", "the other way round", "noisy", "busy"],
)
def test_the_demo_says_in_five_lines_what_its_repeats_support(
    tmp_path, monkeypatch, capsys, measured, waited_share, first, second, trained
):
    """Result first; what is trained follows from what can be told; commands and what they say are in a file."""
    demo = runpy.run_path(str(ROOT / "examples" / "stdlib_demo" / "run.py"))
    there, commands = demo["main"].__globals__, []
    load = MachineLoad(demand=1.0, waited_share=waited_share)
    facts = (("parameters", "1.0 M"),)
    names = zip(demo["STRATEGIES"], measured, (1.3, 1.0), strict=True)
    result = result_of(*(runs(name, batch_run(s, predicted)) for name, s, predicted in names), load=load, facts=facts)

    def run(command, *arguments):
        commands.append((command, *arguments))
        if command == "bench":
            (demo["OUTPUT"] / "bench.json").write_bytes(msgspec.json.encode(result))
        if command == "train":
            rows = ({"loss": 7.634}, {"loss": 7.0}, {"loss": 6.861})
            (demo["OUTPUT"] / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.setattr("sys.argv", ["run.py", "train.steps=3"])
    there |= {"run": run, "library_sources": lambda: [str(ROOT / "tools")]}
    demo["main"]()
    out, errors = capsys.readouterr()
    lines = out.splitlines()
    assert [line.partition(": ")[0] for line in lines] == ["Measured", "Predicted", "Trained", "Open", "Next"]
    assert first in lines[0]
    assert second in lines[1]
    (ratio,) = result.ratios
    assert lines[0].endswith(f"{ratio.by_round}.")
    assert f"times as long: {ratio.verdict}; " in lines[1]
    assert trained in lines[2]
    assert lines[2].endswith("loss 7.63 to 6.86.")
    assert "runs/demo/report.html" in lines[3]
    assert "runs/demo/details.txt" in lines[3]
    assert [command for command, *_ in commands] == ["plan", "bench", "train"]
    assert commands[-1][-1] == f"plan.strategy={trained.partition(' (')[0] if '(' in trained else 'slimpack'}"
    # Nothing is promised before, and whatever is said meanwhile is not in the way of the result.
    assert len(errors.splitlines()) == 4
    assert not any(words in out + errors for words in ("1.15", "1.45", "xpected"))


def test_a_part_of_the_demo_that_fails_says_why(tmp_path, monkeypatch, capsys):
    """The end of what the command said, and its exit code."""
    demo = runpy.run_path(str(ROOT / "examples" / "stdlib_demo" / "run.py"))
    monkeypatch.chdir(tmp_path)
    demo["OUTPUT"].mkdir(parents=True)
    with pytest.raises(SystemExit) as stopped:
        demo["run"]("plan", "missing.npy", "--model", "llama-7b", "--cluster", "h100x8")
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "$ evenload plan missing.npy --model llama-7b" in error
    assert "missing.npy" in error.splitlines()[-1]
