"""Evenload: train large language models fast on documents of very different lengths.

    found = evenload.plan("lengths.npy", model="llama3-8b", cluster="h100x32")    # a Comparison; needs no torch
    run = evenload.train("config.toml", callbacks=[...])                          # a TrainedRun
    loader = evenload.PackedLoader("corpus", tokenizer="model", max_tokens=8192)  # for a loop of one's own

What needs torch is imported when it is asked for, because planning does not. `__version__` is the installed
distribution's, looked up when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from evenload.errors import needs_train_extra

if TYPE_CHECKING:
    from evenload.cli.comparison import Comparison
    from evenload.cli.plan import plan
    from evenload.cli.train import TrainedRun, train
    from evenload.integrations.callback import Callback
    from evenload.integrations.packed_loader import PackedLoader

__all__ = ["Callback", "Comparison", "PackedLoader", "TrainedRun", "__version__", "plan", "train"]

__version__: str


def __getattr__(name: str) -> Any:
    if name in ("TrainedRun", "train"):
        from evenload.cli import train as train_module

        return getattr(train_module, name)
    if name == "Callback":
        from evenload.integrations.callback import Callback

        return Callback
    if name == "Comparison":
        from evenload.cli.comparison import Comparison

        return Comparison
    if name == "PackedLoader":
        with needs_train_extra("evenload.PackedLoader"):
            from evenload.integrations.packed_loader import PackedLoader

        return PackedLoader
    if name == "plan":
        return import_module("evenload.plan")
    if name == "__version__":
        from importlib.metadata import version

        return version("evenload")
    raise AttributeError(f"module 'evenload' has no attribute '{name}'")
