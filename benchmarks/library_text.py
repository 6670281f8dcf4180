"""Real text that every Python has: the source of its standard library as documents, in tokens of its own tokeniser."""

import platform
import re
import statistics
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from tokenizers.trainers import BpeTrainer

from harness import Row
from setups import ROOT  # puts tests/support on the path

from format_files import write_megatron_index  # isort: skip

__all__ = ["ROOT", "library_paragraphs", "paragraphs_of", "write_library"]

SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests"}
HELD_OUT_EVERY = 200


def library_paragraphs(num_modules: int) -> tuple[list[str], list[str]]:
    """Texts between empty lines in the standard library's source, to train and held out; each text once.

    Args:
        num_modules: the first so many files by name; 0 = all.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if not SKIPPED & set(Path(name).parts)][: num_modules or None]
    sources = ((root / name).read_text(encoding="utf-8", errors="replace") for name in names)
    texts = list(dict.fromkeys(text for source in sources for text in paragraphs_of(source)))
    held_out = texts[::HELD_OUT_EVERY]
    del texts[::HELD_OUT_EVERY]
    return texts, held_out


def paragraphs_of(source: str) -> list[str]:
    """Split a text where lines are empty or blank."""
    return [part for part in re.split(r"\n(?:[ \t]*\n)+", source) if part.strip()]


def write_library(directory: Path, vocabulary: int, context: int, num_modules: int = 0) -> Iterator[Row]:
    """Write `train.bin` and `held_out.bin`; rows say what they hold, to compare with one's own.

    Args:
        context: tokens at which documents are cut.
        num_modules: the first so many files of the library by name; 0 = all.
    """
    trained, held_out = library_paragraphs(num_modules)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    alphabet = ByteLevel.alphabet()
    trainer = BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(trained, trainer)
    directory.mkdir(parents=True, exist_ok=True)
    for name, texts in (("train", trained), ("held out", held_out)):
        ids = [one.ids[:context] for one in tokenizer.encode_batch(texts)]
        ids = [one for one in ids if len(one) > 1]
        lengths, path = [len(one) for one in ids], directory / name.replace(" ", "_")
        np.concatenate([np.array(one, np.int32) for one in ids]).tofile(path.with_suffix(".bin"))
        write_megatron_index(path, lengths, list(range(len(lengths) + 1)), "int32")
        case = f"paragraphs of Python {platform.python_version()}'s standard library, {name}, context {context}"
        long = sum(length for length in lengths if 2 * length >= context)
        yield Row("convergence corpus", case, "documents", len(lengths), "documents")
        yield Row("convergence corpus", case, "tokens", sum(lengths), "tokens")
        share = long / sum(lengths)
        yield Row("convergence corpus", case, "tokens in documents of half the context or more", share, "")
        yield Row("convergence corpus", case, "median length", statistics.median(lengths), "tokens")
