"""The ready configurations of `examples/configs` load, fit by prediction, and say what `evenload plan` predicts."""

import json
import re
import shlex
import shutil
from pathlib import Path

import numpy as np
import pytest

from commands import run
from evenload.config.train_config import load_train_config
from evenload.types.model import CONFIGURATIONS
from format_files import write_megatron
from hub_cache import add_model, use_hub_cache

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "examples" / "configs").glob("*.toml"))
_LLAMA31 = {
    "max_position_embeddings": 131_072,
    "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
HUB = {
    "Qwen/Qwen3-8B": CONFIGURATIONS["qwen3-8b"],
    "Qwen/Qwen3-30B-A3B": CONFIGURATIONS["qwen3-30b-a3b"],
    "meta-llama/Llama-3.1-8B": CONFIGURATIONS["llama3-8b"] | _LLAMA31,
}
"""Of models that the configurations name; weights are not there."""


def lengths_from(shortest: int, longest: int, tokens: int) -> list[int]:
    """Lengths of documents of at least so many tokens in all, as many of every octave."""
    generator, lengths = np.random.default_rng(0), [longest]
    while sum(lengths) < tokens:
        lengths.append(int(shortest * (longest / shortest) ** generator.random()))
    return lengths


def write_documents(batch_tokens: int) -> None:
    """Make up what the configurations read, in the working directory; every word is a token."""
    chats = []
    for length in lengths_from(20, 8000, 4 * batch_tokens):
        answer = {"role": "assistant", "content": "word " * (length - 10)}
        chats.append({"messages": [{"role": "user", "content": "word " * 6}, answer]})
    Path("chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    pairs = [
        {"prompt": "word " * 8, "completion": " word" * (length - 9)} for length in lengths_from(20, 4000, 4 * 32_768)
    ]
    Path("instructions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in pairs))
    Path("books").mkdir()
    for index, length in enumerate(lengths_from(500, 131_071, 5_000_000)):
        Path("books", f"{index:03}.txt").write_text("word " * length)
    Path("tokens").mkdir()
    write_megatron(Path("tokens/first"), [[7] * length for length in lengths_from(100, 16_000, 2_500_000)], "int32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A clone's examples beside the documents, and the Hub's cache."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "examples" / "configs", folder / "examples" / "configs")
    for name, config in HUB.items():
        add_model(folder / "hub", name, config)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_documents(524_288)
    return folder


def commands_of(text: str) -> dict[str, str]:
    """The commands in the comments on top, by their first word."""
    head = text.partition("\n\n")[0].replace("\\\n#", "")
    found = re.findall(r"((?:evenload|torchrun) .*)", head)
    return {shlex.split(one)[0] + (" plan" if " plan " in one else ""): one for one in found}


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_a_configuration_fits_and_says_what_is_predicted(path, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    use_hub_cache(folder / "hub", monkeypatch)
    text, name = path.read_text(), f"examples/configs/{path.name}"
    config = load_train_config(Path(name))
    parallel = config.parallel
    processes = parallel.dp * parallel.pp * parallel.cp * parallel.tp
    plan = next(line for line in text.splitlines() if "evenload plan" in line).partition("evenload ")[2]
    assert plan == f"plan {name} --cluster h100x{processes}"
    assert f"train {name}" in text
    assert (f"--nnodes {processes // 8} --nproc-per-node 8 " in text) == (processes > 8)
    assert run(*plan.split(), "--strategy", config.plan.strategy, "--json", "plan.json") == 0, capsys.readouterr()
    found = json.loads(Path("plan.json").read_text())
    (row,) = found["strategies"]
    assert row["feasible"]
    said = re.search(r"predicts ([\d.]+) s a step, at most ([\d.]+) of ([\d.]+) GiB a GPU\.", text)
    assert said is not None
    seconds, used, offered = map(float, said.groups())
    assert seconds == pytest.approx(row["mean_step_time_s"], rel=0.1)
    assert used == pytest.approx(row["peak_memory_bytes"] / 2**30, rel=0.1)
    assert offered == pytest.approx(found["inputs"]["memory_cap_bytes"] / 2**30, abs=0.05)
    bare = [line for line in text.splitlines() if " = " in line and not line.startswith("#") and "# " not in line]
    assert len(bare) <= 8, "most values say why"
    assert len(text.splitlines()) <= 45


def test_the_five_cases_are_there_and_the_pages_name_them():
    assert len(CONFIGS) == 5
    pages = [(ROOT / page).read_text() for page in ("examples/README.md", "docs/tutorial.md")]
    assert "configs" in pages[1]
    for path in CONFIGS:
        assert path.name in pages[0]
