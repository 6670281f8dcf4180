"""Models of 7 and 8 billion weights train whole on one card of 80 GB by the memory model, with both settings that save
memory, and with no other choice of them."""

import json
from pathlib import Path

import pytest

from commands import run
from small_run import write_small_run

MOMENTS, IN_BACKWARD = 'moments = "bfloat16"', "in_backward = true\nclip_norm = 0.0"
IN_HOST_MEMORY = "offload_stages = [0]"
RUN = """
max_document_tokens = 4096
batch_tokens = {tokens}
[plan]
strategy = "balanced"
options = {{ micro_batches = 1, max_pack_tokens = {most} }}
[optimizer]
{optimizer}
[train]
steps = 2
device = "cuda"
"""


def planned(directory: Path, model: str, tokens: int, *optimizer: str) -> tuple[int, dict]:
    """The exit code of `evenload plan` on one H100, and what it says of `balanced`. A batch ends with the document that
    fills it, so a pack may hold one more."""
    texts = ["a" * (200 * (1 + i % 7) + 2000 * (i % 11 == 0)) for i in range(40)]
    file = write_small_run(
        directory, texts, RUN.format(tokens=tokens, most=tokens + 4096, optimizer="\n".join(optimizer))
    )
    file.write_text(file.read_text().replace("random_init = true", 'random_init = true\ndtype = "bfloat16"'))
    out = directory / "out.json"
    arguments = ("--model", model, "--cluster", "h100x1", "--strategy", "balanced", "--steps", "2", "--json", str(out))
    code = run("plan", str(file), *arguments)
    return code, json.loads(out.read_text())["strategies"][0]


@pytest.mark.parametrize(("model", "tokens"), [("llama3-8b", 6144), ("qwen3-8b", 2048), ("qwen2.5-7b", 12288)])
def test_8b_trains_whole_on_one_h100(tmp_path, capsys, model, tokens):
    code, row = planned(tmp_path, model, tokens, MOMENTS, IN_BACKWARD)
    assert code == 0, capsys.readouterr().err
    assert row["feasible"]


def test_8b_trains_with_its_optimizer_in_host_memory(tmp_path, monkeypatch):
    """As many packs as one likes, and no setting that changes what is computed."""
    monkeypatch.setitem(globals(), "RUN", RUN.replace("micro_batches = 1", "micro_batches = 4"))
    code, row = planned(tmp_path, "llama3-8b", 8192, IN_HOST_MEMORY)
    assert code == 0
    assert row["feasible"]


@pytest.mark.parametrize("optimizer", [[], [MOMENTS], [IN_BACKWARD]], ids=["neither", "moments", "in backward"])
def test_one_of_both_is_not_enough(tmp_path, capsys, optimizer):
    code, row = planned(tmp_path, "llama3-8b", 4096, *optimizer)
    assert code == 3
    assert not row["feasible"]
    assert "no strategy fits" in capsys.readouterr().err


def test_a_plan_of_two_packs_does_not_fit_updates_in_backward(tmp_path, capsys, monkeypatch):
    """Without [plan]'s one micro-batch; the plan says what to set."""
    monkeypatch.setitem(globals(), "RUN", RUN.replace("micro_batches = 1", "micro_batches = 2"))
    code, _ = planned(tmp_path, "qwen3-0.6b", 8192, IN_BACKWARD)
    assert code == 3
    assert "a replica has 2 backward packs" in capsys.readouterr().err
