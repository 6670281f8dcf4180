"""Pages, blocks and pictures that tools make are what the tools make today; run `make docs`, or the tool."""

import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLES = runpy.run_path(str(ROOT / "tools" / "make_tables.py"))


def tool(name):
    return runpy.run_path(str(ROOT / "tools" / f"{name}.py"))


@pytest.mark.parametrize(
    ("page", "name"),
    [(page, name) for page, blocks in TABLES["BLOCKS"].items() for name in blocks],
    ids=lambda value: getattr(value, "stem", value),
)
def test_a_block_is_what_todays_rows_give(page, name):
    """A figure that no row backs, or a rule of the matrix without documentation; run tools/make_tables.py."""
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name}: make docs -->\n", f"<!-- end of {name} -->\n"
    assert text.count(begin) == text.count(end) == 1
    assert text.split(begin)[1].split(end)[0] == TABLES["BLOCKS"][page][name]()


def test_every_file_of_rows_is_on_a_page():
    """Rows that nobody reads go, with their benchmark."""
    source = "".join((ROOT / "tools" / name).read_text() for name in ("make_tables.py", "paper_tables.py"))
    unread = [file.stem for file in (ROOT / "benchmarks" / "results").glob("*.csv") if f'"{file.stem}"' not in source]
    assert unread == []


def test_the_page_of_decoders_is_made_of_its_rows():
    """Rows of another sweep, or a page changed by hand; run tools/sweep_decoders.py --page."""
    sweep = tool("sweep_decoders")
    assert sweep["PAGE"].read_text(encoding="utf-8") == sweep["page_of"](sweep["read_rows"]())


def test_the_page_of_settings_is_the_generated_one():
    """A key without documentation, or documentation of a key that is gone; run tools/make_configuration.py."""
    made = tool("make_configuration")
    assert made["TARGET"].read_text(encoding="utf-8") == made["configuration_page"]()


@pytest.fixture(scope="module")
def guide():
    return tool("make_guide")


def commands(page):
    """The page with continued lines joined."""
    return " ".join(page.replace("\\\n", " ").split())


def test_the_guide_shows_what_its_commands_print(guide):
    """Run tools/make_guide.py."""
    page = guide["PAGE"].read_text(encoding="utf-8")
    for name, block in guide["cheap_blocks"]().items():
        assert guide["block_of"](page, name) == block, name
    for command in ("FIRST", "STRATEGIES", "SEARCH", "LENGTHS", "STEPS"):
        assert " ".join(guide[command]) in commands(page)


def test_the_layout_that_the_guide_says_wins_is_planned_as_it_says(guide):
    """The search itself takes minutes, so it runs in `make docs` only."""
    page = guide["PAGE"].read_text(encoding="utf-8")
    assert guide["block_of"](page, "winner output") == guide["winner_output"]()


@pytest.fixture(scope="module")
def glance():
    return tool("make_glance")


def test_the_readmes_picture_is_of_todays_plans(glance):
    """Run tools/make_glance.py."""
    panels = glance["panels"]()
    best_fit, auto = panels
    assert auto.step_s < best_fit.step_s
    assert auto.idle_share < best_fit.idle_share
    assert glance["TARGET"].read_text(encoding="utf-8") == glance["picture"](panels)


def test_the_picture_of_losses_is_made_of_its_rows():
    """Run tools/make_convergence.py."""
    made = tool("make_convergence")
    assert made["TARGET"].read_text(encoding="utf-8") == made["picture"](made["curves"]())


def test_the_page_of_accuracy_its_picture_and_the_intervals_are_made_of_the_rows():
    script = tool("make_accuracy")
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"]()
    assert script["PICTURE"].read_text(encoding="utf-8") == script["picture"](script["held"]())
    assert script["INTERVALS"].read_bytes() == script["intervals"]()
