"""`evenload train` on GPUs for tests: a corpus of token ids, a configuration, a run in processes of its own."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
from transformers import Qwen2Config

SMALL = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
"""Widths of Qwen2.5-0.5B; head dim 64."""


def write_run(
    directory: Path, lengths: list[int], *, layers: int = 6, vocab_size: int = 32_000, batch_documents: int, steps: int
) -> Path:
    """A run's configuration; documents are `lengths`, in order of a shuffle.

    Args:
        layers: of a model with the widths of `SMALL`.
    """
    edges = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    ids = np.random.default_rng(0).integers(0, 257, edges[-1], dtype=np.int32)
    corpus = directory / "corpus"
    corpus.mkdir(parents=True)
    np.save(corpus / "tokens.npy", ids)
    np.save(corpus / "tokens.idx.npy", edges)
    config = Qwen2Config(
        **SMALL,
        vocab_size=vocab_size,
        num_hidden_layers=layers,
        max_position_embeddings=2 * max(lengths),
        tie_word_embeddings=True,
    )
    config.save_pretrained(directory / "model")
    file = directory / "config.toml"
    file.write_text(
        f"""
        [model]
        path = "{directory / "model"}"
        random_init = true
        dtype = "bfloat16"
        [data]
        sources = ["{corpus / "tokens.npy"}"]
        record = "tokens"
        max_document_tokens = {max(lengths)}
        batch_documents = {batch_documents}
        epochs = 1000
        [plan]
        options = {{ max_pack_tokens = {max(lengths)} }}
        [train]
        output_dir = "{directory / "run"}"
        device = "cuda"
        steps = {steps}
        export_hf = false
        """
    )
    return file


def train(config: Path, *overrides: str) -> list[dict]:
    """Rows of metrics.jsonl of a finished run.

    Raises:
        AssertionError: with what the run printed, where it failed.
    """
    output = config.parent / f"run-{len(list(config.parent.glob('run*')))}"
    arguments = [str(config), *overrides, f'train.output_dir="{output}"']
    command = [sys.executable, "-m", "evenload.cli.main", "train", *arguments]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
