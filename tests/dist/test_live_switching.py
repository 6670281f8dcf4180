"""Layouts that change between steps: what is trained stays the same, to rounding; what moves, to the bit."""

from pathlib import Path

import numpy as np
import pytest

from switch_cases import Outcome, scripted_run
from training_cases import write_training_config

LAYOUTS = ["pp=4", "pp=2,dp=2", "dp=4", "pp=3,layers=1+2+1"]
STEPS = 40
# Every change of shape there is among the four, and back; layouts by index, of which 0 is that of [parallel].
SWITCHES = [1, 0, 2, 0, 3, 0, 1, 2, 1, 3, 1, 2, 3, 2, 0, 3, 1, 0, 2, 0]


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    """A tiny Llama with tied embeddings on documents of very different lengths, in float64."""
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    for i in range(24):
        (corpus / f"{i}.txt").write_text(f"document {i} " * (1 + (i * 7) % 5 + (12 if i % 11 == 0 else 0)))
    return str(write_training_config(tmp_path, corpus, data="prefetch_steps = 2"))


def settings(tmp_path: Path, name: str, *more: str, layouts: list[str] | None = LAYOUTS) -> list[str]:
    chosen = [] if layouts is None else [f"plan.layouts={layouts}"]
    # At a rate at which AdamW does not blow rounding of tiny gradients up within so many steps.
    fixed = ["optimizer.learning_rate=1e-3", "plan.strategy=balanced", f"train.steps={STEPS}"]
    return [*chosen, *fixed, f"train.output_dir={tmp_path / name}", *more]


def assert_same_training(found: Outcome, expected: Outcome, tolerance: float) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert found.norms == pytest.approx(expected.norms, rel=10 * tolerance)
    assert found.state.keys() == expected.state.keys()
    for name, tensor in expected.state.items():
        difference = np.linalg.norm(found.state[name] - tensor)
        assert difference <= tolerance * max(np.linalg.norm(tensor), 1e-12), name


@pytest.mark.long
def test_twenty_switches_train_what_one_layout_and_one_process_train(gloo_pool, config_file, tmp_path):
    """Losses, weights and optimizer state after 40 steps, with tied embeddings and an idle rank now and then."""
    script = [0, *(layout for layout in SWITCHES for _ in range(2))][:STEPS]
    moved = gloo_pool.run(4, scripted_run, config_file, settings(tmp_path, "moved", "parallel.pp=4"), script, STEPS)[0]
    fixed = settings(tmp_path, "fixed", "parallel.dp=2", layouts=None)
    still = gloo_pool.run(2, scripted_run, config_file, fixed, [0], STEPS)[0]
    alone = gloo_pool.run(1, scripted_run, config_file, settings(tmp_path, "alone", layouts=None), [0], STEPS)[0]

    assert len(moved.switches) == 20
    assert set(moved.layouts) == {"pp=4", "dp=2 pp=2", "dp=4", "pp=3 layers=1+2+1"}
    assert moved.losses[-1] < moved.losses[0]
    assert_same_training(moved, still, 1e-10)
    assert_same_training(moved, alone, 1e-10)
    for switch in moved.switches:
        assert switch.weight_bytes == switch.predicted_weight_bytes
        assert switch.state_bytes == switch.predicted_state_bytes
    # Growing replicas into stages moves no weights: every rank has all of them.
    shrunk = [switch for switch in moved.switches if switch.before == "dp=4"]
    assert shrunk
    assert all(switch.weight_bytes == 0 and switch.state_bytes > 0 for switch in shrunk)
