"""`import evenload` as somebody meets it in a prompt: what it has, what `help` shows, and mistyped arguments."""

import inspect
import pickle
import pydoc
import subprocess
import sys

import pytest

import evenload
from evenload.errors import ConfigError

FUNCTIONS = {
    "evenload.plan": evenload.plan,
    "evenload.train": evenload.train,
    "evenload.micro_batches": evenload.micro_batches,
    "PackedLoader": evenload.PackedLoader,
}


@pytest.mark.parametrize(
    ("name", "given", "meant"),
    [
        ("evenload.plan", {"lengths": [8], "stratgy": "all"}, "strategy"),
        ("evenload.plan", {"length": [8], "model": "llama-7b"}, "lengths"),
        ("evenload.plan", {"lengths": [8], "serch_layout": True}, "search_layout"),
        ("evenload.train", {"config": "config.toml", "overides": ["train.steps=2"]}, "overrides"),
        ("evenload.train", {"config": "config.toml", "callback": []}, "callbacks"),
        ("evenload.micro_batches", {"lengths": [8], "rank": 2}, "ranks"),
        ("evenload.micro_batches", {"lengths": [8], "ranks": 2, "max_docs": 2}, "max_documents"),
        ("PackedLoader", {"data": "corpus", "max_tokns": 64}, "max_tokens"),
        ("PackedLoader", {"data": "corpus", "max_tokens": 64, "Strategy": "auto"}, "strategy"),
        ("PackedLoader", {"data": "corpus", "max_tokens": 64, "batch_docs": 2}, "batch_documents"),
    ],
)
def test_a_mistyped_argument_names_the_nearest(name, given, meant):
    """Also where the right one is needed, for which Python's own error would only say that it is missing."""
    wrong = next(iter(given.keys() - {*inspect.signature(FUNCTIONS[name]).parameters, "lengths", "data"}))
    with pytest.raises(ConfigError) as refused:
        FUNCTIONS[name](**given)
    assert str(refused.value) == f"{name} has no '{wrong}'; did you mean '{meant}'?"


def test_what_is_like_nothing_lists_what_there_is():
    with pytest.raises(ConfigError, match=r"evenload\.train has no 'xyz'; it takes config, callbacks, overrides$"):
        evenload.train("config.toml", xyz=1)
    with pytest.raises(ConfigError, match="PackedLoader has no 'batch_size'; it is called batch_documents or"):
        evenload.PackedLoader("corpus", batch_size=8)
    with pytest.raises(TypeError, match="missing 1 required keyword-only argument: 'max_tokens'"):
        evenload.PackedLoader("corpus")


def test_functions_keep_their_signatures_and_names():
    assert list(inspect.signature(evenload.train).parameters) == ["config", "callbacks", "overrides"]
    assert list(inspect.signature(evenload.PackedLoader).parameters) == ["data", "max_tokens", "settings"]
    assert list(inspect.signature(evenload.micro_batches).parameters) == ["lengths", "ranks", "max_tokens", "rules"]
    for name, function in FUNCTIONS.items():
        assert pickle.loads(pickle.dumps(function)) is function
        text = pydoc.plain(pydoc.render_doc(function))
        assert f"{name.rpartition('.')[2]}(" in text
        for parameter in inspect.signature(function).parameters:
            assert parameter in text


def test_dir_and_help_show_what_there_is_with_and_without_torch():
    """`help` imports every name of `dir`, and must not end in an error where PyTorch is not installed."""
    assert set(dir(evenload)) == set(evenload.__all__)
    for blocked in ("", "sys.modules.update(torch=None, transformers=None)"):
        code = f"import sys; {blocked}\nimport evenload, pydoc; print(pydoc.plain(pydoc.render_doc(evenload)))"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        for name in ("plan(lengths", "train(config", "micro_batches(lengths", "class Callback", "class Comparison"):
            assert name in done.stdout
        assert ("class PackedLoader" in done.stdout) == (not blocked)
