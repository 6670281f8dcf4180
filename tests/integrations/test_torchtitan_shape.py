from importlib.machinery import ModuleSpec

import pytest

from evenload.errors import ConfigError
from evenload.integrations import batch_formats
from evenload.integrations.batch_formats import resolve_format

SETTINGS = """
class Profiling:
    local_batch_size: int = 1
    num_tokens_per_microbatch_per_dp_rank: int = 1

@dataclass(kw_only=True)
class TrainingConfig:
    {field}: int = 8
    \"\"\"Not a class: local_batch_size, num_tokens_per_microbatch_per_dp_rank.\"\"\"
"""


def install(monkeypatch, root, source):
    """A torchtitan whose settings are this text; None = not installed."""
    spec = None
    if source is not None:
        (root / "config").mkdir()
        (root / "config" / "configs.py").write_text(source)
        spec = ModuleSpec("torchtitan", None, is_package=True)
        spec.submodule_search_locations = [str(root)]
    monkeypatch.setattr(batch_formats.importlib.util, "find_spec", lambda name: spec)


@pytest.mark.parametrize(
    ("field", "format"),
    [
        ("num_tokens_per_microbatch_per_dp_rank", "torchtitan_folded"),
        ("local_batch_size", "torchtitan_batched"),
    ],
)
def test_the_shape_is_that_of_the_installed_torchtitan(monkeypatch, tmp_path, field, format):
    install(monkeypatch, tmp_path, SETTINGS.format(field=field))
    assert resolve_format("torchtitan") == format


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (None, "it is not installed"),
        (SETTINGS.format(field="seq_len"), "has neither of"),
        ("class TrainingConfig(:", "cannot be read"),
    ],
    ids=["not-installed", "unknown-names", "not-python"],
)
def test_what_is_not_known_is_asked_for(monkeypatch, tmp_path, source, message):
    install(monkeypatch, tmp_path, source)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_format("torchtitan")
    assert "torchtitan_folded" in str(caught.value)
    assert "torchtitan_batched" in str(caught.value)


@pytest.mark.parametrize("format", ["torchtitan_folded", "torchtitan_batched", "hf"])
def test_an_explicit_shape_asks_nobody(monkeypatch, tmp_path, format):
    install(monkeypatch, tmp_path, None)
    assert resolve_format(format) == format
