"""Runs of `evenload train` on random token ids (tests/support), for benchmarks that start some."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from token_run import save_tokens, write_token_run

__all__ = ["save_tokens", "write_token_run"]
