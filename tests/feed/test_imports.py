"""What a fresh interpreter imports: the loader no layout search, and the planner no reader of data."""

import importlib.util
import subprocess
import sys
import textwrap

from corpus_files import write_corpus

CORE = ("types", "cost", "schedule", "stepplan", "planning")
NOT_OF_THE_LOADER = ("explore", "report", "cli", "calibrate", "bench", "check", "planning.layouts", "runtime.executor")
MOST_MODULES = 175


def run(program, *arguments):
    """The printed lines of a Python program in a fresh interpreter."""
    command = [sys.executable, "-c", textwrap.dedent(program), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split()


def test_a_loader_imports_the_planner_and_the_data_room_only(tmp_path):
    program = """
        import sys
        from evenload import PackedLoader
        with PackedLoader(sys.argv[1], tokenizer="bytes", max_tokens=64, batch_documents=2, workers=0) as loader:
            next(iter(loader))
        print(*(name for name in sys.modules if name.startswith("evenload")))
    """
    result = run(program, write_corpus(tmp_path, "jsonl", ["a", "b"]))
    rooms = tuple(f"evenload.{name}" for name in NOT_OF_THE_LOADER)
    assert all(map(importlib.util.find_spec, rooms)), "a room that is gone holds nothing away"
    assert [name for name in result if f"{name}.".startswith(tuple(f"{room}." for room in rooms))] == []
    assert len(result) < MOST_MODULES


def test_importing_evenload_and_its_command_imports_no_torch():
    """The lazy name of the loader must not change that; other names are attribute errors."""
    program = """
        import sys, evenload, evenload.cli.main
        print("torch" in sys.modules)
        try: evenload.Nothing
        except AttributeError as error: print(error)
    """
    result = run(program)
    assert result[0] == "False"
    assert "no attribute 'Nothing'" in " ".join(result)


def test_feed_imports_no_planner():
    program = """
        import sys
        import evenload.feed.step_maker, evenload.feed.collate, evenload.feed.prefetcher
        print(*{name.split(".")[1] for name in sys.modules if name.startswith("evenload.")})
    """
    assert "planning" not in run(program)


def test_the_planner_core_needs_none_of_the_loaders_packages():
    program = """
        import importlib, pkgutil, sys
        for blocked in ("pyarrow", "jinja2", "tokenizers", "typer", "rich", "fsspec", "torch"):
            sys.modules[blocked] = None  # which makes its import fail
        for room in sys.argv[1:]:
            package = importlib.import_module(f"evenload.{room}")
            for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
                importlib.import_module(module.name)
                print(module.name)
    """
    assert len(run(program, *CORE)) > 50
