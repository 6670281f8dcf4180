"""Evenload: train large language models fast on documents of very different lengths.

`PackedLoader` is imported when it is asked for: it needs torch, and planning does not. `__version__` is the installed
distribution's, looked up when it is asked for.
"""

from typing import TYPE_CHECKING, Any

from evenload.types.train_extra import needs_train_extra

if TYPE_CHECKING:
    from evenload.integrations.packed_loader import PackedLoader

__all__ = ["PackedLoader", "__version__"]

__version__: str


def __getattr__(name: str) -> Any:
    if name == "PackedLoader":
        with needs_train_extra("evenload.PackedLoader"):
            from evenload.integrations.packed_loader import PackedLoader

        return PackedLoader
    if name == "__version__":
        from importlib.metadata import version

        return version("evenload")
    raise AttributeError(f"module 'evenload' has no attribute '{name}'")
