"""`--strategy flexpipe` trains: the layout follows the lengths, and what is trained stays that of one process."""

from pathlib import Path

import pytest

from dist_training import Outcome, assert_same_training, run_outcome
from training_cases import write_phases, write_training_config

PHASES = "ssllssls"
CAP_BYTES = 6_000_000
"""Long batches take 7.2 MB in four replicas and 5.0 MB in two pipelines of two; short ones 2.5 MB at most."""
RELY_ON_PREDICTIONS = "plan.options.flexpipe={known_steps=2, margin=0.0, patience_steps=1, follow_measured=false}"


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    corpus = write_phases(tmp_path / "corpus", PHASES)
    data = "prefetch_steps = 2\nstreams = 1"
    file = write_training_config(tmp_path, corpus, data, num_layers=4)
    text = file.read_text().replace("batch_documents = 7", "batch_documents = 8")
    file.write_text(text.replace("window = 16", "window = 1"))
    return str(file)


def settings(tmp_path: Path, name: str, *more: str) -> list[str]:
    return [
        *("optimizer.learning_rate=1e-3", f"train.steps={len(PHASES)}", f"train.output_dir={tmp_path / name}"),
        *("plan.options.policy=replay", *more),
    ]


def layouts(*more: str) -> tuple[str, ...]:
    return ("parallel.dp=4", 'plan.layouts=["pp=2", "pp=4"]', "plan.strategy=flexpipe", *more)


def run(gloo_pool, ranks: int, config_file: str, overrides: list[str], stop_after: int = len(PHASES)) -> Outcome:
    cap_bytes = CAP_BYTES if ranks > 1 else 2**34
    return gloo_pool.run(ranks, run_outcome, config_file, overrides, cap_bytes, stop_after)[0]


@pytest.mark.long
def test_the_layout_follows_the_lengths_and_a_resumed_run_decides_alike(gloo_pool, config_file, tmp_path):
    """Four switches in eight steps; stopped between two of them, the same steps, losses and weights to the bit."""
    flexible = settings(tmp_path, "whole", *layouts(RELY_ON_PREDICTIONS))
    whole = run(gloo_pool, 4, config_file, flexible)
    alone = run(gloo_pool, 1, config_file, settings(tmp_path, "alone", "plan.strategy=balanced"))

    reported = [(one.action, one.layout) for one in whole.decisions]
    flat, deep = "dp=4", "dp=2 pp=2"
    assert reported == [
        *(("stay", flat), ("stay", flat), ("grow", deep), ("stay", deep)),
        *(("shrink", flat), ("stay", flat), ("grow", deep), ("shrink", flat)),
    ]
    switched = [one for one in whole.decisions if one.is_switch]
    assert [one.step for one in switched] == [2, 4, 6, 7]
    assert len(whole.switches) == 4
    for decision, switch in zip(switched, whole.switches, strict=True):
        assert decision.measured_switch_s == switch.stall_s + switch.wait_s > 0
        assert decision.moved_bytes == switch.weight_bytes + switch.state_bytes > 0
    assert [one.known_steps for one in whole.decisions[-2:]] == [2, 1]  # nothing comes behind the last

    assert_same_training(whole, alone, 1e-10)

    stopped = settings(tmp_path, "stopped", *layouts(RELY_ON_PREDICTIONS))
    first = run(gloo_pool, 4, config_file, stopped, stop_after=3)
    rest = run(gloo_pool, 4, config_file, stopped)
    resumed = (*first.decisions, *rest.decisions)
    assert [(one.action, one.layout) for one in resumed] == reported
    # Where a run will be stopped is no end of its data: what is known of coming steps is the same.
    assert [one.known_steps for one in resumed] == [one.known_steps for one in whole.decisions]
    assert [*first.losses, *rest.losses] == pytest.approx(whole.losses, rel=1e-12)
    assert len(rest.switches) == 1 + 3  # processes start in the layout of [parallel]


@pytest.mark.long
@pytest.mark.parametrize(
    ("cap_bytes", "deep"),
    [
        # A stage of two processes beside one of one, and as little as the head leaves to the last stage.
        (7_000_000, "pp=2 devices=1+2"),
        (6_000_000, "pp=3 layers=1+2+1"),
    ],
)
def test_without_declared_layouts_stages_are_cut_for_every_batch(gloo_pool, config_file, tmp_path, cap_bytes, deep):
    """By HBSA, on three processes, of which none is idle; stopped in a layout that nothing declares, to the bit."""

    def run_three(name: str, stop_after: int = len(PHASES)) -> Outcome:
        overrides = settings(tmp_path, name, "parallel.dp=3", "plan.strategy=flexpipe", RELY_ON_PREDICTIONS)
        return gloo_pool.run(3, run_outcome, config_file, overrides, cap_bytes, stop_after)[0]

    whole = run_three("whole")
    reported = [(one.action, one.layout) for one in whole.decisions]
    there, back = ("grow", deep), ("shrink", "dp=3")
    stay = ("stay", "dp=3")
    assert reported == [stay, stay, there, ("stay", deep), back, stay, there, back]
    alone = run(gloo_pool, 1, config_file, settings(tmp_path, "alone", "plan.strategy=balanced"))
    assert_same_training(whole, alone, 1e-10)

    first, rest = run_three("stopped", stop_after=3), run_three("stopped")
    assert [(one.action, one.layout) for one in (*first.decisions, *rest.decisions)] == reported
    assert [*first.losses, *rest.losses] == pytest.approx(whole.losses, rel=1e-12)


@pytest.mark.long
def test_the_monitor_follows_a_run_and_travels_in_its_checkpoint(gloo_pool, config_file, tmp_path):
    """Whatever the machine's speed, a batch that does not fit makes the layout change."""
    overrides = settings(tmp_path, "measured", *layouts("plan.options.flexpipe={known_steps=2}"))
    first = run(gloo_pool, 4, config_file, overrides, stop_after=4)
    assert first.decisions[2].case == 3
    assert first.num_known == 4  # two steps ahead, the running one and the one before
    rest = run(gloo_pool, 4, config_file, overrides)
    assert len(rest.decisions) == 4
    assert rest.num_known == 4
