import subprocess
import sys

LOADED = "import sys; print(*sorted(one for one in sys.modules if one.startswith('evenload.')))"


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True).stdout


def test_importing_evenload_imports_no_torch():
    """Planning works on a machine without torch; the lazy name must not change that."""
    assert run("import sys, evenload, evenload.cli.main; print('torch' in sys.modules)").strip() == "False"


def test_a_loader_brings_the_planner_and_the_data_alone():
    loaded = run(f"from evenload import PackedLoader; {LOADED}").split()
    assert "evenload.plan.planner" in loaded
    rooms = ("explore", "report", "plan.layouts", "runtime.executor", "cli")
    assert not [one for one in loaded if one.startswith(tuple(f"evenload.{room}" for room in rooms))]


def test_packed_loader_is_found_at_the_top():
    assert run("from evenload import PackedLoader; print(PackedLoader.__module__)").strip() == (
        "evenload.integrations.packed_loader"
    )


def test_unknown_names_are_attribute_errors():
    code = "import evenload\ntry: evenload.Nothing\nexcept AttributeError as error: print(error)"
    assert "no attribute 'Nothing'" in run(code)
