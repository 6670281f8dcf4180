"""Layouts that change between steps: what is trained stays the same, to rounding; what moves, to the bit."""

import shutil
from pathlib import Path

import numpy as np
import pytest

from dist_training import assert_same_training
from small_run import write_small_run
from sweeps import sweep
from switch_cases import changed_by_moving, refused_layouts, scripted_run, through_host
from training_cases import write_training_config

LAYOUTS = ["pp=4", "pp=2,dp=2", "dp=4", "pp=3,layers=1+2+1", "pp=3,devices=1+2+1"]
STEPS = 40
# Every change that there is among the five, once; layouts by index, of which 0 is that of [parallel].
SWITCHES = [4, 3, 4, 2, 4, 1, 4, 0, 3, 2, 3, 1, 3, 0, 2, 1, 2, 0, 1, 0]


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    """A tiny Llama with tied embeddings on documents of very different lengths, in float64."""
    texts = (f"document {i} " * (1 + (i * 7) % 5 + (12 if i % 11 == 0 else 0)) for i in range(24))
    return str(write_training_config(tmp_path, texts, data="prefetch_steps = 2", num_layers=4))


def settings(tmp_path: Path, name: str, *more: str, layouts: list[str] | None = LAYOUTS) -> list[str]:
    chosen = [] if layouts is None else [f"plan.layouts={layouts}"]
    # At a rate at which AdamW does not blow rounding of tiny gradients up within so many steps.
    fixed = ["optimizer.learning_rate=1e-3", "plan.strategy=balanced", "data.batch_documents=4", f"train.steps={STEPS}"]
    return [*chosen, *fixed, f"train.output_dir={tmp_path / name}", *more]


@pytest.mark.long
def test_twenty_switches_train_what_one_layout_and_one_process_train(gloo_pool, config_file, tmp_path):
    """Losses, weights and optimizer state after 40 steps, with tied embeddings and an idle rank now and then."""
    script = [0, *(layout for layout in SWITCHES for _ in range(2))][:STEPS]
    moved = gloo_pool.run(4, scripted_run, config_file, settings(tmp_path, "moved", "parallel.pp=4"), script, STEPS)[0]
    fixed = settings(tmp_path, "fixed", "parallel.dp=2", layouts=None)
    still = gloo_pool.run(2, scripted_run, config_file, fixed, [0], STEPS)[0]
    alone = gloo_pool.run(1, scripted_run, config_file, settings(tmp_path, "alone", layouts=None), [0], STEPS)[0]

    assert len(moved.switches) == 20
    assert set(moved.layouts) == {"pp=4", "dp=2 pp=2", "dp=4", "pp=3 layers=1+2+1", "pp=3 devices=1+2+1"}
    assert len({(switch.before, switch.after) for switch in moved.switches}) == 20
    assert moved.losses[-1] < moved.losses[0]
    assert_same_training(moved, still, 1e-10)
    assert_same_training(moved, alone, 1e-10)
    # Growing replicas into stages moves no weights: every rank has all of them.
    shrunk = [switch for switch in moved.switches if switch.before == "dp=4"]
    assert shrunk
    assert all(switch.weight_bytes == 0 and switch.state_bytes > 0 for switch in shrunk)


@pytest.mark.parametrize("devices", sweep([[2, 1, 1], [1, 2, 1]], 1), ids=str)
def test_stages_of_unequal_numbers_of_devices_train_what_one_process_trains(gloo_pool, config_file, tmp_path, devices):
    """Losses, norms, weights and optimizer state of a run that starts in such a layout; two share its packs."""
    wide = ["parallel.pp=3", f"parallel.stage_devices={devices}", "plan.options.micro_batches=4"]
    chosen = settings(tmp_path, "wide", *wide, "data.batch_documents=6", layouts=None)
    result = gloo_pool.run(4, scripted_run, config_file, chosen, [0], 4)[0]
    fixed = settings(tmp_path, "alone", "data.batch_documents=6", layouts=None)
    alone = gloo_pool.run(1, scripted_run, config_file, fixed, [0], 4)[0]
    assert result.layouts == [f"pp=3 devices={'+'.join(map(str, devices))}"] * 4
    assert_same_training(result, alone, 1e-10)


def run_file(tmp_path: Path, kind: str = "llama", **model: object) -> str:
    """Short documents; the model has four layers."""
    texts = (f"document {i} " * (1 + (i * 7) % 4) for i in range(12))
    lines = "max_document_tokens = 128\nbatch_documents = 4\n[optimizer]\nlearning_rate = 1e-3\n[train]\nsteps = 9"
    return str(write_small_run(tmp_path, texts, lines, kind, **model))


LORA = ["model.lora.rank=2", "model.lora.alpha=4.0"]
MOVED = {
    "bf16 with fp32 masters, tied": ("llama", {"tied": True}, ["model.dtype=bfloat16"], LAYOUTS),
    "learned positions, tied": ("gpt2", {"tied": True}, ["model.dtype=float64"], LAYOUTS),
    "experts": (
        "qwen3_moe",
        {"tied": False},
        ["model.dtype=float32", "model.router_aux_loss_coef=0.01"],
        ["pp=2,dp=2", "dp=4", "pp=2,virtual=2"],
    ),
    "adapters, tied": ("llama", {"tied": True}, ["model.dtype=float32", *LORA], LAYOUTS),
}


@pytest.mark.parametrize("name", sweep(list(MOVED), 3))
def test_no_bit_changes_on_the_way_through_all_layouts(gloo_pool, tmp_path, name):
    """Weights, moments and masters, whole, after every change; then a step is trained."""
    kind, model, overrides, layouts = MOVED[name]
    order = [*range(1, len(layouts) + ("pp=4" not in layouts)), 0]
    chosen = ["parallel.pp=4", f"plan.layouts={layouts}", "plan.strategy=balanced", *overrides]
    assert gloo_pool.run(4, changed_by_moving, run_file(tmp_path, kind, **model), chosen, order, 2) == [[]] * 4


SHARED = {
    "a budget for some pieces": ("plan.twin_bytes=60_000", None),
    "two machines": ("plan.strategy=balanced", 2),
    "nothing shared": ("plan.twin_bytes=0", None),
}


@pytest.mark.parametrize("name", sweep(list(SHARED), 2))
def test_no_bit_changes_whatever_is_shared(gloo_pool, tmp_path, name):
    """Sent, read, and what comes to a machine once and is relayed there; with frozen weights."""
    limit, ranks_per_machine = SHARED[name]
    chosen = ["parallel.pp=4", f"plan.layouts={LAYOUTS}", "plan.strategy=balanced", limit, "model.dtype=float32"]
    arguments = run_file(tmp_path, tied=True), [*chosen, *LORA], [1, 2, 3, 2, 0], 2, ranks_per_machine
    assert gloo_pool.run(4, changed_by_moving, *arguments) == [[]] * 4


THROUGH_HOST = {
    "all": ([], None),
    "a budget for some pieces": (["plan.twin_bytes=120_000"], None),
    "two machines": ([], 2),
    "tensor parallel": (["parallel.tp=2", "parallel.pp=2", 'plan.layouts=["dp=2", "pp=2,layers=3+1"]'], None),
}


@pytest.mark.parametrize("name", THROUGH_HOST)
def test_no_bit_changes_through_host_memory(gloo_pool, tmp_path, name):
    """The node's file that GPUs copy through: to it, from it, and what is relayed in it, with frozen weights; what the
    file has of a switch before is not taken for that of this one."""
    more, ranks_per_machine = THROUGH_HOST[name]
    chosen = ["parallel.pp=4", f"plan.layouts={LAYOUTS}", "plan.strategy=balanced", "model.dtype=float32", *LORA, *more]
    order = [1, 2, 0, 2, 1] if name == "tensor parallel" else [1, 2, 3, 2, 0, 2, 0]
    arguments = run_file(tmp_path, tied=True), chosen, order, 2, ranks_per_machine
    assert gloo_pool.run(4, through_host, changed_by_moving, *arguments) == [[]] * 4


def test_switches_through_host_memory_train_what_one_process_trains(gloo_pool, tmp_path):
    """In float64, with updates between switches, and one switch after another."""
    file, base, script = (
        run_file(tmp_path, tied=True),
        ["model.dtype=float64", "plan.strategy=balanced"],
        [0, 1, 2, 0, 4, 2],
    )
    live = [*base, "parallel.pp=4", f"plan.layouts={LAYOUTS}", f"train.output_dir={tmp_path}/moved"]
    moved = gloo_pool.run(4, through_host, scripted_run, file, live, script, 6)[0]
    alone = gloo_pool.run(1, scripted_run, file, [*base, f"train.output_dir={tmp_path}/alone"], [0], 6)[0]
    assert len(moved.switches) == 5
    assert_same_training(moved, alone, 1e-10)


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"cp": 2}], ids=["tensor parallel", "context parallel"])
def test_groups_of_tensor_and_context_ranks_stay_and_their_parts_move(gloo_pool, tmp_path, sizes):
    (axis, size), file = *sizes.items(), run_file(tmp_path, tied=True)
    chosen = [f"parallel.{axis}={size}", "parallel.pp=2", 'plan.layouts=["dp=2", "pp=2,layers=3+1"]']
    assert gloo_pool.run(4, changed_by_moving, file, [*chosen, "model.dtype=float64"], [1, 2, 0], 1) == [[]] * 4


def test_a_tensor_parallel_rank_that_was_idle_trains_again(gloo_pool, tmp_path):
    """Its tensor-parallel group comes with the layout in which it has a place again."""
    file, base = run_file(tmp_path, tied=True), ["model.dtype=float64", "plan.strategy=balanced"]
    chosen = ["parallel.tp=2", "parallel.pp=2", 'plan.layouts=["pp=1,dp=1"]', f"train.output_dir={tmp_path}/moved"]
    moved = gloo_pool.run(4, scripted_run, file, [*base, *chosen], [0, 1, 0], 3)[0]
    alone = gloo_pool.run(1, scripted_run, file, [*base, f"train.output_dir={tmp_path}/alone"], [0], 3)[0]
    assert moved.layouts == ["pp=2 tp=2", "tp=2", "pp=2 tp=2"]
    assert_same_training(moved, alone, 1e-10)


def test_a_checkpoint_between_switches_goes_on_there_and_elsewhere(gloo_pool, tmp_path):
    """In the same layouts to the bit, though a run starts in [parallel]'s; with other processes to rounding."""
    file = run_file(tmp_path, tied=True)
    base = ["model.dtype=float64", "plan.strategy=balanced"]
    live = [*base, "parallel.pp=4", f"plan.layouts={LAYOUTS}"]
    script = [0, 1, 2, 2, 4]
    whole = gloo_pool.run(4, scripted_run, file, [*live, f"train.output_dir={tmp_path}/whole"], script, 5)[0]
    here = f"train.output_dir={tmp_path}/parts"
    first = gloo_pool.run(4, scripted_run, file, [*live, here], script, 3)[0]
    shutil.copytree(tmp_path / "parts", tmp_path / "elsewhere")
    rest = gloo_pool.run(4, scripted_run, file, [*live, here], script, 5)[0]
    assert rest.layouts == whole.layouts[3:]
    assert [switch.after for switch in rest.switches] == ["dp=4", "pp=3 devices=1+2+1"]
    assert first.losses + rest.losses == whole.losses
    assert all(np.array_equal(rest.state[name], tensor) for name, tensor in whole.state.items())
    there = [*base, "parallel.dp=2", f"train.output_dir={tmp_path}/elsewhere"]
    other = gloo_pool.run(2, scripted_run, file, there, [0], 5)[0]
    assert other.losses == pytest.approx(whole.losses[3:], rel=1e-10)


def test_a_plan_of_a_layout_without_groups_is_refused(gloo_pool, tmp_path):
    """And one that changes the layout without saying so."""
    reported = gloo_pool.run(2, refused_layouts, run_file(tmp_path), ["parallel.pp=2", 'plan.layouts=["dp=2"]'])
    for undeclared, unsaid in reported:
        assert "a plan is made for pp=2 virtual=2, this run may take pp=2, dp=2" in undeclared
        assert "but pp=2 runs in the same generation (0)" in unsaid
