"""Documents of random token ids, and a run of `evenload train` on such, as tests and benchmarks write them down."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from transformers import PretrainedConfig

from format_files import write_megatron_index

_NUM_IDS = 257
"""Of random ids; any model's vocabulary holds as many."""


def save_tokens(
    directory: Path, lengths: Sequence[int] | np.ndarray, num_ids: int, random: np.random.Generator
) -> None:
    """Documents of such lengths as Megatron's `tokens.bin` and its index.

    Args:
        num_ids: ids are below it.
        random: that ids are drawn from.
    """
    random.integers(0, num_ids, sum(lengths), dtype=np.int32).tofile(directory / "tokens.bin")
    write_megatron_index(directory / "tokens", list(lengths), list(range(len(lengths) + 1)), "int32")


def write_token_run(
    directory: Path, model: PretrainedConfig, lengths: Sequence[int], batch: str, *, steps: int, device: str = "cuda"
) -> Path:
    """Model, corpus and config.toml of a run in bf16 with random weights; returns the path of the latter.

    Args:
        lengths: tokens of the documents, which are read in order of a shuffle, again and again.
        batch: what makes a global batch, "batch_tokens = 16384" for example.
    """
    corpus = directory / "corpus"
    corpus.mkdir(parents=True)
    save_tokens(corpus, lengths, _NUM_IDS, np.random.default_rng(0))
    model.save_pretrained(directory / "model")
    file = directory / "config.toml"
    file.write_text(
        f"""
        [model]
        path = "{directory / "model"}"
        random_init = true
        dtype = "bfloat16"
        [data]
        sources = ["{corpus / "tokens.bin"}"]
        record = "tokens"
        max_document_tokens = {max(lengths)}
        {batch}
        epochs = 1000
        [plan]
        options = {{ max_pack_tokens = {max(lengths)} }}
        [train]
        output_dir = "{directory / "run"}"
        device = "{device}"
        steps = {steps}
        export_hf = false
        """
    )
    return file


def write_run(
    directory: Path, model: PretrainedConfig, lengths: Sequence[int] | np.ndarray, batch_documents: int, steps: int,
    settings: str = "",
) -> Path:  # fmt: skip
    """Model, documents of these lengths read in order, and config.toml of a run with one thread a process.

    Args:
        settings: further TOML, `[parallel]` and `[plan]`.
    """
    save_tokens(directory, lengths, min(model.vocab_size, 4096), np.random.default_rng(0))
    model.save_pretrained(directory / "model")
    file = directory / "config.toml"
    file.write_text(
        f"""
        [model]
        path = "{directory / "model"}"
        random_init = true
        [data]
        sources = ["{directory / "tokens.bin"}"]
        record = "tokens"
        max_document_tokens = {int(max(lengths))}
        batch_documents = {batch_documents}
        shuffle_window = 1
        streams = 1
        workers = 0
        [train]
        output_dir = "{directory / "run"}"
        steps = {steps}
        threads_per_process = 1
        {settings}
        """
    )
    return file
