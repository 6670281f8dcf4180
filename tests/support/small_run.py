"""A run of a tiny model with random weights on text files, as a user would write it down."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from dist_training import COSTS
from evenload.cost.coefficients import MeasuredOn, write_coefficients
from evenload.data.hub import model_from
from reference_training import tiny_config

LONG_TAILED_TEXTS = tuple(f"document {i} " * (1 + (i * 7) % 13 + (40 if i % 9 == 0 else 0)) for i in range(30))


def write_small_run(directory: Path, texts: Iterable[str], settings: str, kind: str = "llama", **model: object) -> Path:
    """Model, corpus and config.toml, read in a thread; returns the path of the latter.

    Args:
        texts: of documents, the files corpus/00.txt, corpus/01.txt, ..., read in this order where nothing shuffles.
        settings: TOML; begins inside the table `data`, ends inside `train`, which gets an `output_dir`.
        kind, model: of `tiny_config`, with a word for every byte and the end of a document.
    """
    tiny_config(kind, vocab_size=257, **model).save_pretrained(directory / "model")
    (directory / "corpus").mkdir()
    for i, text in enumerate(texts):
        (directory / "corpus" / f"{i:02d}.txt").write_text(text)
    file = directory / "config.toml"
    file.write_text(
        f"""
        [model]
        path = "{directory / "model"}"
        random_init = true
        [data]
        sources = ["{directory / "corpus"}"]
        workers = 0
        {settings}
        output_dir = "{directory / "run"}"
        """
    )
    return file


def write_steps(directory: Path, steps: int, **model: object) -> Path:
    """`write_small_run` of so many steps of six short documents."""
    settings = f"""
        max_document_tokens = 256
        batch_documents = 6
        [train]
        steps = {steps}
    """
    return write_small_run(directory, (f"document {i} " * (1 + (i * 7) % 5) for i in range(40)), settings, **model)


def write_small_costs(directory: Path, bytes_per_element: int = 4, **layout: int) -> Path:
    """cost.json as if measured on the run's model in a layout; sizes that are not given are 1."""
    model = msgspec.structs.replace(model_from(str(directory / "model")), bytes_per_element=bytes_per_element)
    measured_on = MeasuredOn(model=model, **{"dp": 1, "cp": 1, "pp": 1, "tp": 1, **layout})
    write_coefficients(directory / "cost.json", msgspec.structs.replace(COSTS, measured_on=measured_on))
    return directory / "cost.json"
