"""Models of 7 and 8 billion weights train whole on one card of 80 GB by the memory model, with both settings that save
memory, and with no other choice of them."""

import json
from pathlib import Path

import pytest

from commands import run
from small_run import write_small_run

MOMENTS, IN_BACKWARD = 'moments = "bfloat16"', "in_backward = true\nclip_norm = 0.0"
RUN = """
max_document_tokens = 8192
batch_tokens = 16384
[plan]
strategy = "balanced"
options = {{ micro_batches = 1, max_pack_tokens = 20480 }}
[optimizer]
{optimizer}
[train]
steps = 2
device = "cuda"
"""


def planned(directory: Path, model: str, *optimizer: str) -> tuple[int, dict]:
    """The exit code of `evenload plan` on one H100, and what it says of `balanced`."""
    texts = ["a" * (500 * (1 + i % 7) + 4000 * (i % 11 == 0)) for i in range(40)]
    settings = RUN.format(optimizer="\n".join(optimizer))
    file = write_small_run(directory, texts, settings)
    file.write_text(file.read_text().replace("random_init = true", 'random_init = true\ndtype = "bfloat16"'))
    out = directory / "out.json"
    arguments = ("--model", model, "--cluster", "h100x1", "--strategy", "balanced", "--json", str(out))
    code = run("plan", str(file), *arguments)
    return code, json.loads(out.read_text())["strategies"][0]


@pytest.mark.parametrize("model", ["llama3-8b", "qwen3-8b", "qwen2.5-7b"])
def test_8b_trains_whole_on_one_h100(tmp_path, model, capsys):
    code, row = planned(tmp_path, model, MOMENTS, IN_BACKWARD)
    print(row)
    assert code == 0, capsys.readouterr().err
    assert row["feasible"]
