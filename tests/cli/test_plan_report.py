import json
import re

import numpy as np
import pytest

from evenload.cli.main import main
from evenload.report.units import format_seconds


def test_page_holds_all_strategies_and_steps_with_the_numbers_of_the_json(tmp_path) -> None:
    """Table, JSON and page must agree: they show one evaluation."""
    np.save(tmp_path / "lengths.npy", np.random.default_rng(0).integers(1, 5000, 200))
    with pytest.raises(SystemExit) as stopped:
        main(
            [
                *("plan", str(tmp_path / "lengths.npy"), "--model", "llama-7b", "--cluster", "h100x8"),
                *("--layout", "dp=2,pp=4", "--documents", "40", "--steps", "2"),
                *("--strategy", "best_fit,balanced,slimpack"),
                *("--html", str(tmp_path / "a.html"), "--json", str(tmp_path / "a.json")),
            ]
        )
    assert not stopped.value.code
    page = (tmp_path / "a.html").read_text()
    rows = json.loads((tmp_path / "a.json").read_text())["strategies"]

    def data(identifier: str) -> dict:
        found = re.search(f'<script type="application/json" id="{identifier}-data">(.*?)</script>', page, re.DOTALL)
        assert found is not None
        return json.loads(found[1])

    steps = data("step-view")
    assert [section["name"] for section in steps["sections"]] == ["best_fit", "balanced", "slimpack"]
    for section, row in zip(steps["sections"], rows, strict=True):
        assert [step["step"] for step in section["steps"]] == [0, 1]
        assert [step["views"]["predicted"]["stepTimeS"] for step in section["steps"]] == row["step_time_s"]
        bubbles = [step["views"]["predicted"]["bubble"] for step in section["steps"]]
        assert np.mean(bubbles) == pytest.approx(row["bubble_fraction"])
        assert all(step["plan"] for step in section["steps"])
        assert all("weights" in step["views"]["predicted"]["memoryKinds"] for step in section["steps"])
    # Stacked losses add up to the step time of the table.
    assert page.count('<span class="value">') > 3 * len(rows)
    for row in rows:
        total_s = sum(row["time_split"].values())
        assert total_s == pytest.approx(row["mean_step_time_s"], rel=5e-3)
        assert f"{format_seconds(total_s)} predicted, " in page
        # Beside the shapes of the packs, forward and backward.
        assert f'<span class="value">{row["imbalance_forward"]:.3f}' in page
        assert f'<span class="value">{row["imbalance_backward"]:.3f}' in page
    assert '<figure id="classes"' in page
