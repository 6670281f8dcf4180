import subprocess
import sys


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout


def test_importing_evenload_imports_no_torch():
    """Planning works on a machine without torch; the lazy name must not change that."""
    assert run("import sys, evenload, evenload.cli.main; print('torch' in sys.modules)").strip() == "False"


def test_unknown_names_are_attribute_errors():
    code = "import evenload\ntry: evenload.Nothing\nexcept AttributeError as error: print(error)"
    assert "no attribute 'Nothing'" in run(code)
