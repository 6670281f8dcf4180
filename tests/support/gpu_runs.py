"""`evenload train` on GPUs for tests: widths of a small model, runs in processes of their own."""

import json
import subprocess
import sys
from pathlib import Path

from transformers import Qwen2Config

from token_run import write_token_run

SMALL = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
"""Widths of Qwen2.5-0.5B; head dim 64."""


def write_run(
    directory: Path, lengths: list[int], *, layers: int = 6, vocab_size: int = 32_000, batch_documents: int, steps: int
) -> Path:
    """A run's configuration, of a model with the widths of `SMALL`; documents are `lengths`, in order of a shuffle."""
    config = Qwen2Config(
        **SMALL,
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        max_position_embeddings=2 * max(lengths),
        tie_word_embeddings=True,
    )
    return write_token_run(directory, config, lengths, f"batch_documents = {batch_documents}", steps=steps)


def train(config: Path, *overrides: str, output: Path | None = None) -> list[dict]:
    """Rows of metrics.jsonl of a finished run, by default in a new directory beside the configuration."""
    output = output or config.parent / f"run-{len(list(config.parent.glob('run*')))}"
    # What is timed decides no loss; the runs of a part have three minutes in all.
    arguments = [str(config), "train.calibration_max_s=2", *overrides, f'train.output_dir="{output}"']
    command = [sys.executable, "-m", "evenload.cli.main", "train", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
