import subprocess
import sys


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout


def test_importing_evenload_imports_no_torch():
    """Planning works on a machine without torch; the lazy name must not change that."""
    code = "import sys, evenload, evenload.cli.main; print('torch' in sys.modules, 'PackedLoader' in dir(evenload))"
    assert run(code).split()[0] == "False"


def test_packed_loader_is_found_at_the_top():
    assert run("from evenload import PackedLoader; print(PackedLoader.__module__)").strip() == (
        "evenload.integrations.packed_loader"
    )


def test_unknown_names_are_attribute_errors():
    code = "import evenload\ntry: evenload.Nothing\nexcept AttributeError as error: print(error)"
    assert "no attribute 'Nothing'" in run(code)
