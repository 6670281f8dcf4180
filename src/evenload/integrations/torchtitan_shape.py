"""Which shape the installed torchtitan takes its batches in: [T], or [1, T] as up to its release 0.3.0.

The change came between releases, so a version number does not tell. What tells is the size of a batch in torchtitan's
training settings, which was renamed by the same change: `local_batch_size` (sequences) became
`num_tokens_per_microbatch_per_dp_rank`. The settings are read as text: importing torchtitan takes seconds and all of
its requirements.
"""

import ast
import importlib.util
from pathlib import Path

from evenload.errors import ConfigError

_SETTINGS = Path("config", "configs.py")
_BATCHED = "local_batch_size"
_FOLDED = "num_tokens_per_microbatch_per_dp_rank"
_EXPLICIT = 'say format="torchtitan_folded" ([T]) or format="torchtitan_batched" ([1, T], torchtitan up to 0.3.0)'


def torchtitan_is_folded() -> bool:
    """The installed torchtitan takes [T]; a `ConfigError` where there is none, or its settings have neither name."""
    spec = importlib.util.find_spec("torchtitan")
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(
            f"format 'torchtitan' asks the installed torchtitan for its shape, and it is not installed; {_EXPLICIT}"
        )
    file = Path(next(iter(spec.submodule_search_locations))) / _SETTINGS
    try:
        names = training_settings(file.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError) as err:
        raise ConfigError(
            f"the settings of the installed torchtitan cannot be read ('{file}': {err}); {_EXPLICIT}"
        ) from err
    if (_FOLDED in names) == (_BATCHED in names):
        has = "both" if _FOLDED in names else "neither"
        raise ConfigError(
            f"the TrainingConfig of the installed torchtitan ('{file}') has {has} of {_FOLDED} and {_BATCHED}, so the "
            f"shape of its batches is not known; {_EXPLICIT}"
        )
    return _FOLDED in names


def training_settings(source: str) -> set[str]:
    """Names of the fields of `TrainingConfig` in Python source; empty if there is no such class."""
    return {
        field.target.id
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.ClassDef) and node.name == "TrainingConfig"
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
