"""Whole training runs in every kind of layout: equal to plain AdamW, exactly resumable, exported alike."""

import math
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dist_training import make_trainer, memory_steps, train_steps
from evenload.calibrate.calibrate import calibrate
from evenload.config.train_config import layout_of, load_train_config
from evenload.cost.coefficients import CostCoefficients
from evenload.data.batches import decode_state
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import ConfigError
from evenload.runtime.checkpoint.checkpoint import Progress
from evenload.runtime.model.model_config import load_config
from quick_calibration import quick_calibration
from sweeps import sweep
from training_cases import STEPS, UNEVEN_TEXTS, loss_of, plain_losses, write_training_config


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama of 257 words, which do not divide by 2, on documents of very different lengths, in float64."""
    return write_training_config(tmp_path_factory.mktemp("run"), UNEVEN_TEXTS, num_layers=4)


@pytest.fixture(scope="module")
def expected_losses(config_file: Path) -> list[float]:
    losses = plain_losses(load_train_config(config_file, []))
    assert losses[-1] < losses[0]
    return losses


def layout_settings(**sizes: int) -> list[str]:
    return [f"parallel.{name}={value}" for name, value in sizes.items()]


def num_ranks(sizes: dict[str, int]) -> int:
    return math.prod(size for name, size in sizes.items() if name != "virtual")


@pytest.mark.parametrize(
    ("sizes", "strategy", "policy"),
    sweep(
        [
            ({}, "slimpack", "replay"),
            ({"pp": 2, "virtual": 2}, "auto", "recompute"),
            ({"pp": 2, "dp": 2, "virtual": 2}, "balanced", "offload"),
            ({"tp": 2, "cp": 2}, "skrull", "choose"),
            ({"tp": 2, "dp": 2}, "slimpack", "offload"),
            ({"dp": 3}, "best_fit", "choose"),
            ({"tp": 2, "pp": 2, "virtual": 2}, "slimpack", "replay"),
            ({"dp": 2, "pp": 2, "tp": 2}, "auto", "choose"),
            ({"pp": 4}, "auto", "offload"),
            ({"dp": 2, "virtual": 2}, "slimpack", "replay"),
            ({"tp": 2, "pp": 2}, "auto", "recompute"),
        ],
        6,
    ),
)
def test_loss_trajectory_equals_plain_adamw(gloo_pool, config_file, expected_losses, tmp_path, sizes, strategy, policy):
    """Clipping, warm-up, weight decay, sharded state, parts of matrices, tied weights: every update, to 1e-9."""
    overrides = [*layout_settings(**sizes), f"plan.strategy={strategy}", f"plan.options.policy={policy}"]
    overrides.append(f"train.output_dir={tmp_path}")
    steps = gloo_pool.run(num_ranks(sizes), memory_steps, str(config_file), overrides, STEPS)[0]
    assert [step.loss for step in steps] == pytest.approx(expected_losses, rel=1e-9)
    if policy != "choose":
        assert {policy} == frozenset.union(*(step.policies for step in steps))
    if strategy == "auto" and sizes.get("virtual", 1) > 1:
        assert "W" in frozenset.union(*(step.kinds for step in steps)), "backwards are really split"


@pytest.mark.parametrize(
    ("sizes", "dtype", "stops"),
    sweep(
        [
            ({"pp": 2, "dp": 2}, "bfloat16", (2,)),
            ({"tp": 2, "dp": 2}, "bfloat16", (1,)),
            ({"pp": 2, "dp": 2}, "bfloat16", (1, 3)),
            ({"pp": 2, "dp": 2}, "float32", (1, 3)),
        ],
        1,
    ),
    ids=str,
)
def test_resume_at_any_step_is_exact_to_the_bit(gloo_pool, config_file, tmp_path, sizes, dtype, stops):
    """A new trainer after every stop: the same losses, to the last bit (bf16: master weights survive)."""
    fixed = [*layout_settings(**sizes), f"model.dtype={dtype}"]
    whole = gloo_pool.run(4, train_steps, str(config_file), [*fixed, f"train.output_dir={tmp_path}/whole"], STEPS)[0]
    assert len(whole) == STEPS
    resumed = []
    for stop in (*stops, STEPS):
        here = [*fixed, f"train.output_dir={tmp_path}/resumed"]
        resumed += gloo_pool.run(4, train_steps, str(config_file), here, stop)[0]
    assert resumed == whole


DELAYING = {
    "wlb": ["plan.strategy=wlb", "plan.options.max_delay_steps=3"],
    "wlb queues": [
        "plan.strategy=wlb",
        "plan.options.wlb.release=queues",
        "plan.options.wlb.outlier_lengths=[120]",
        "plan.options.max_delay_steps=3",
    ],
    "fixed_greedy": ["plan.strategy=fixed_greedy", "plan.options.window=3"],
}


def progress_after(directory: Path, steps: int) -> Progress:
    result = directory / "checkpoints" / f"step-{steps:08d}" / "progress.json"
    return msgspec.json.decode(result.read_bytes(), type=Progress)


@pytest.mark.parametrize("strategy", sweep(list(DELAYING), 1))
def test_resume_while_documents_wait_is_exact_to_the_bit(gloo_pool, config_file, tmp_path, strategy):
    """Which documents wait, and since when, must travel with the step that is saved, not with those prepared ahead."""
    fixed = ["parallel.dp=2", *DELAYING[strategy]]
    whole = gloo_pool.run(2, train_steps, str(config_file), [*fixed, f"train.output_dir={tmp_path}/whole"], STEPS)[0]
    resumed, waiting = [], []
    for stop in (*sorted(sweep((2, 1, 3), 2)), STEPS):
        here = [*fixed, f"train.output_dir={tmp_path}/resumed"]
        resumed += gloo_pool.run(2, train_steps, str(config_file), here, stop)[0]
        waiting.append(len(progress_after(tmp_path / "resumed", stop).planner.waiting))
    assert resumed == whole
    assert sum(count > 0 for count in waiting) >= len(waiting) // 2, f"documents were put off: {waiting}"


@pytest.mark.parametrize("strategy", list(DELAYING))
def test_documents_put_off_are_trained_before_the_data_ends(gloo_pool, config_file, tmp_path, strategy):
    overrides = [*DELAYING[strategy], "data.epochs=1", "train.steps=50", f"train.output_dir={tmp_path}/out"]
    losses = gloo_pool.run(2, train_steps, str(config_file), ["parallel.dp=2", *overrides], 50)[0]
    progress = progress_after(tmp_path / "out", len(losses))
    saved = tmp_path / "out" / "checkpoints" / f"step-{len(losses):08d}" / "loader.json"
    ledger = decode_state(saved.read_bytes()).ledger
    assert ledger.trained == ledger.read
    assert progress.planner.waiting == ()


def test_a_checkpoint_moves_between_any_layouts(gloo_pool, config_file, expected_losses, tmp_path):
    """State is by unit, range of elements and part of a matrix, and knows layers, not stages."""
    losses = []
    for stop_after, (sizes, more) in enumerate(
        (
            ({"pp": 2, "virtual": 2}, []),
            ({"tp": 2, "dp": 2}, []),
            ({"pp": 2, "cp": 2}, ["parallel.stage_layers=[3, 1]"]),
            ({"dp": 3}, []),
        ),
        start=1,
    ):
        here = [*layout_settings(**sizes), *more, f"train.output_dir={tmp_path}"]
        losses += gloo_pool.run(num_ranks(sizes), train_steps, str(config_file), here, stop_after)[0]
    assert losses == pytest.approx(expected_losses, rel=1e-9)


def test_runs_that_share_documents_equal_runs_that_do_not(gloo_pool, tmp_path):
    """The same losses and updates as of one process, to 1e-9, where some slice is really shared by so many ranks."""
    texts = ("word " * (60 if i % 9 == 4 else 1 + (i * 7) % 4) for i in range(40))
    config = str(write_training_config(tmp_path, texts, num_layers=4))
    runs = [
        (1, {}, ["plan.strategy=balanced"]),
        (2, {"cp": 2, "pp": 2}, ["plan.options.cp_sharding=adaptive", "plan.strategy=balanced"]),
        (2, {"cp": 2, "dp": 2}, ["plan.options.cp_sharding=per_document", "plan.options.dp_merge=false"]),
        (3, {"cp": 3}, ["plan.strategy=slimpack", "parallel.cp_exchange=ring"]),
        (2, {"cp": 2}, ["plan.strategy=skrull"]),
        (2, {"dp": 2, "pp": 2}, ["plan.strategy=slimpack"]),
        (4, {"dp": 4}, ["plan.strategy=auto"]),
    ]
    losses = []
    for sharing, sizes, more in runs:
        lengths = ["data.max_document_tokens=320", "data.batch_documents=9", "plan.options.max_pack_tokens=320"]
        here = [*lengths, *layout_settings(**sizes), *more, f"train.output_dir={tmp_path}/{len(losses)}"]
        steps = gloo_pool.run(num_ranks(sizes), memory_steps, config, ["train.steps=3", *here], 3)[0]
        assert max(step.most_ranks for step in steps) == sharing
        losses.append([step.loss for step in steps])
        assert losses[-1] == pytest.approx(losses[0], rel=1e-9)
    assert len(set(losses[0])) == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["parallel.stage_layers=[2, 2, 1]"], r"parallel.stage_layers is \[2, 2, 1\], must be 2 numbers"),
        (["parallel.stage_layers=[4, 0]"], "of at least 1"),
        (["parallel.stage_layers=[2, 3]"], "hold 5 layers, the model has 4"),
        (["parallel.virtual=0"], "parallel.virtual is 0, must be at least 1"),
        (["parallel.virtual=3"], "4 layers cannot fill 6 stages"),
        (["parallel.virtual=2", "parallel.stage_layers=[2, 2]"], r"must be 4 .* parallel.pp x parallel.virtual stages"),
    ],
)
def test_stages_that_the_model_does_not_have_are_refused(config_file, settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        layout_of(load_train_config(config_file, ["parallel.pp=2", *settings]).parallel, 4)


@pytest.mark.parametrize("sizes", [{"pp": 2, "virtual": 2}, {"tp": 2, "pp": 2}], ids=str)
def test_exported_model_loads_in_transformers(gloo_pool, config_file, tmp_path, sizes):
    """Every rank writes its parts of all its stages, tied weights once; the next loss is that of the written model."""
    overrides = [*layout_settings(**sizes), f"train.output_dir={tmp_path}/out"]
    gloo_pool.run(num_ranks(sizes), train_steps, str(config_file), overrides, 2, True)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model", dtype=torch.float64)
    loader = GlobalBatchLoader(load_train_config(config_file, overrides).data)
    for _ in range(3):
        batch = loader.next_batch()
    assert batch is not None
    continued = gloo_pool.run(num_ranks(sizes), train_steps, str(config_file), overrides, 3)[0]
    assert continued[0] == pytest.approx(loss_of(model, batch), rel=1e-9)


def test_where_memory_is_short_a_run_goes_on_with_less_of_it(gloo_pool, config_file, tmp_path):
    """Under a limit between what replay and what recomputing needs, `choose` plans what fits, and it does."""

    def run(name, *overrides):
        common = ["parallel.pp=2", "plan.strategy=slimpack", f"train.output_dir={tmp_path}/{name}"]
        return gloo_pool.run(2, memory_steps, str(config_file), [*common, *overrides], 2)[0]

    free = run("free")
    least = run("least", "plan.options.policy=offload")
    needed, possible = (max(step.predicted_bytes for step in steps) for steps in (free, least))
    assert possible < needed
    limit = possible + (needed - possible) // 4
    short = run("short", f"plan.memory_bytes={limit}")
    assert frozenset.union(*(step.policies for step in free)) == {"replay"}
    assert frozenset.union(*(step.policies for step in short)) > {"replay"}
    assert max(step.peak_bytes for step in free) > max(step.peak_bytes for step in short)
    assert all(step.peak_bytes <= step.predicted_bytes <= limit for step in short)
    assert [step.loss for step in short] == pytest.approx([step.loss for step in free], rel=1e-9)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_train_as_on_one_rank(gloo_pool, config_file, tmp_path):
    """Of an adapter the matrix at the cut is cut, the other whole; back from a checkpoint of another tp."""
    hf = load_config(str(config_file.parent / "model"))
    AutoModelForCausalLM.from_config(hf, dtype=torch.float64).save_pretrained(tmp_path / "base")
    common = [
        f"model.path={tmp_path / 'base'}",
        "model.random_init=false",
        "model.lora={rank=3, alpha=6.0}",
        "plan.options.policy=recompute",
        "plan.strategy=auto",
    ]
    runs = []
    for name, parts in (("whole", [({}, 2)]), ("parts", [({"tp": 2, "pp": 2}, 1), ({"tp": 2, "dp": 2}, 2)])):
        losses = []
        for sizes, stop_after in parts:
            here = [*common, *layout_settings(**sizes), f"train.output_dir={tmp_path / name}"]
            losses += gloo_pool.run(math.prod(sizes.values()), train_steps, str(config_file), here, stop_after, True)[0]
        runs.append((losses, load_file(tmp_path / name / "adapter" / "adapter_model.safetensors")))
    (whole, whole_adapter), (parts, parts_adapter) = runs
    assert parts == pytest.approx(whole, rel=1e-9)
    assert whole_adapter.keys() == parts_adapter.keys()
    for name, tensor in whole_adapter.items():
        torch.testing.assert_close(parts_adapter[name], tensor, rtol=1e-8, atol=1e-10)


def calibrated(config_file: str, overrides: list[str]) -> bytes:
    trainer = make_trainer(config_file, overrides)
    with quick_calibration():
        costs, _ = calibrate(trainer.state.stages, trainer.model, trainer.mesh, 256, "this machine")
    return msgspec.json.encode(costs)


def test_calibration_measures_parts_and_says_seconds_of_whole_layers(gloo_pool, config_file):
    """All ranks try the same packs, though their clocks differ; transfers are in the layers' seconds, once."""
    result = {}
    for tp in (1, 2):
        ranks = gloo_pool.run(tp, calibrated, str(config_file), layout_settings(tp=tp))
        assert len(set(ranks)) == 1
        result[tp] = msgspec.json.decode(ranks[0], type=CostCoefficients)
    assert result[2].tensor_exposed_share == 0.0
    assert result[2].group_link(2, stride=1).bandwidth_bytes_per_s > 0
    assert result[2].head_s_per_token > 0


def test_an_epochs_small_last_batch_trains_under_interleaved_stages(gloo_pool, tmp_path):
    """Two pipeline ranks of two virtual stages, batches of 6, 6 and 1 documents: packs are no multiple of the ranks."""
    texts = (f"document {i} " * (1 + (i * 7) % 13) for i in range(13))
    config = write_training_config(tmp_path, texts, data="epochs = 1", num_layers=4)
    overrides = [
        *("parallel.pp=2", "parallel.virtual=2", "plan.strategy=balanced", "plan.options.schedule=interleaved"),
        *("data.batch_documents=6", "train.steps=3"),
    ]
    ranks = gloo_pool.run(2, train_steps, str(config), overrides, 4)
    assert len(ranks[0]) == 3
    assert ranks[0] == pytest.approx(plain_losses(load_train_config(config, overrides)), rel=1e-9)
