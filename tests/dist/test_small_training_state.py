"""bfloat16 moments with masters in halves, and updates in backward: what they compute, hold, keep and refuse."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from test_optimizers import BF16, as_bf16, given_gradient, updated_in_bf16

from dist_training import assert_same_training, make_trainer, run_outcome
from evenload.cli.worker_setup import require_runnable
from evenload.config.train_config import load_train_config
from evenload.cost.memory import static_kinds
from evenload.errors import ConfigError
from evenload.runtime.optim import optimizer
from evenload.runtime.optim.data_parallel import _square_sum
from evenload.runtime.optim.optimizer import LOWER_HALF, OffloadedState, joined, split
from evenload.runtime.replay.host_copies import ThreadHostCopies
from life_cases import train_with_a_poisoned_token
from training_cases import STEPS, UNEVEN_TEXTS, plain_model, write_training_config

MOMENTS = ["model.dtype=bfloat16", "optimizer.moments=bfloat16"]
ONE_PACK = [
    *("optimizer.clip_norm=0", "plan.strategy=balanced"),
    *("plan.options.micro_batches=1", "plan.options.max_pack_tokens=4096"),
]
IN_BACKWARD = [*ONE_PACK, "optimizer.in_backward=true"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_training_config(tmp_path, UNEVEN_TEXTS, num_layers=3)


def untie(config_file: Path) -> None:
    file = config_file.parent / "model" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"tie_word_embeddings": False}))


def run(gloo_pool, config_file: Path, ranks: int, *settings: str, stop_after: int = STEPS):
    sizes = [] if any(one.startswith("parallel.") for one in settings) else [f"parallel.dp={ranks}"]
    return gloo_pool.run(ranks, run_outcome, str(config_file), [*sizes, *settings], 2**34, stop_after)[0]


def test_halves_give_the_master_to_the_bit_and_the_weight_nearest_to_it():
    masters = torch.randn(100_003, generator=torch.Generator().manual_seed(0))
    edges = [0.0, -0.0, 1e-44, -1e-38, 3.4028234e38, -3.4028234e38, float("inf"), -float("inf")]
    masters[: len(edges)] = torch.tensor(edges)
    ties = torch.tensor([0x3F808000, 0x3F818000, -0x407F8000], dtype=torch.int32).view(torch.float32)
    masters[-3:] = ties
    weights, lower = torch.zeros_like(masters, dtype=torch.bfloat16), torch.zeros_like(masters, dtype=torch.int16)
    split(masters.clone(), weights, lower)
    assert torch.equal(joined(weights, lower).view(torch.int32), masters.view(torch.int32))
    is_tie = masters.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(weights[~is_tie], masters[~is_tie].bfloat16())
    assert (weights[is_tie].float().abs() > masters[is_tie].abs()).all(), "ties away from 0"
    # A GPU's NaN, whose upper half would overflow.
    nans = torch.tensor([0x7FFFFFFF, -1, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    split(nans.clone(), weights[:3], lower[:3])
    assert weights[:3].isnan().all()
    assert joined(weights[:3], lower[:3]).isnan().all()


@pytest.mark.parametrize("size", [0, 5, 4096, 3 * 4096 + 17])
def test_squares_are_summed_in_fp64(size):
    values = torch.randn(size, generator=torch.Generator().manual_seed(size)) * 1e-4 + 1e-4
    exact = values.double().square().sum()
    assert float(_square_sum(values)) == pytest.approx(float(exact), rel=1e-6)
    assert _square_sum(values).dtype == torch.float64
    assert float(_square_sum(values.double())) == pytest.approx(float(exact), rel=1e-12)


def test_updates_are_adamw_s_with_moments_rounded_after_each(gloo_pool, config_file, monkeypatch):
    """Gradients are given; the moving average is that of masters, which lose nothing."""
    settings = [*BF16, *MOMENTS, "parallel.dp=2", "optimizer.clip_norm=1e9"]
    result, same = gloo_pool.run(2, updated_in_bf16, str(config_file), settings)
    config = load_train_config(config_file, settings)
    o, decay = config.optimizer, config.train.ema_decay
    assert decay is not None
    for name, start in plain_model(config, torch.bfloat16).named_parameters():
        master = start.detach().float().requires_grad_()
        average, moments = master.detach().clone(), [torch.zeros_like(master, dtype=torch.bfloat16) for _ in range(2)]
        for step in range(config.train.steps or 0):
            weight_decay = o.weight_decay if master.ndim > 1 else 0.0
            rates = {"lr": o.rate(step, config.train.steps), "weight_decay": weight_decay}
            adamw = torch.optim.AdamW([master], betas=(o.beta1, o.beta2), eps=o.eps, fused=True, **rates)
            wide = {key: one.float() for key, one in zip(("exp_avg", "exp_avg_sq"), moments, strict=True)}
            adamw.state[master] = wide | {"step": torch.tensor(float(step))}
            master.grad = given_gradient(name, tuple(master.shape), step)
            adamw.step()
            moments = [one.bfloat16() for one in wide.values()]
            average.lerp_(master.detach(), 1 - decay)
        kept = {kind: result[f"optimizer.{name}.{kind}"] for kind in ("exp_avg", "exp_avg_sq", "average", LOWER_HALF)}
        mine = joined(as_bf16(result[f"model.{name}"]).flatten(), torch.from_numpy(kept[LOWER_HALF]).flatten())
        # Last bits follow how a loop is divided into vectors, and a moment at the edge of two roundings follows them.
        assert mine.numpy() == pytest.approx(master.detach().flatten().numpy(), rel=1e-5, abs=1e-7), name
        assert kept["average"] == pytest.approx(average.numpy(), rel=1e-5, abs=1e-7), name
        for kind, one in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            is_same = as_bf16(kept[kind]) == one
            assert is_same.float().mean() > 0.999, (name, kind)
            assert as_bf16(kept[kind]).float().numpy() == pytest.approx(one.float().numpy(), rel=2**-7, abs=1e-30)
    assert all(np.array_equal(result[name], same[name]) for name in result), "ranks agree to the bit"


def test_moments_of_two_bytes_learn_as_those_of_four(gloo_pool, config_file, tmp_path):
    # Measured for the packs of this strategy: of others the losses of bfloat16 differ as much again.
    more = ["model.dtype=bfloat16", "train.steps=12", "data.epochs=5", "optimizer.beta2=0.99"]
    more.append("plan.strategy=slimpack")
    wide = run(gloo_pool, config_file, 1, *more, stop_after=12)
    half = run(gloo_pool, config_file, 1, *more, *MOMENTS, f"train.output_dir={tmp_path}/half", stop_after=12)
    assert half.losses[0] == wide.losses[0]
    assert half.losses[:5] == pytest.approx(wide.losses[:5], rel=2e-3)
    # Of what there is to learn: as processors with and without matrix units for bfloat16 multiply, losses that have
    # fallen to a ninth differ by up to half of it.
    assert half.losses == pytest.approx(wide.losses, abs=1e-3 * wide.losses[0])
    assert half.losses != wide.losses
    assert wide.losses[-1] < 0.9 * wide.losses[0], "it learns"


def test_state_of_six_bytes_goes_on_to_the_bit_and_into_any_layout(gloo_pool, config_file, tmp_path):
    here = f"train.output_dir={tmp_path}/resumed"
    first = run(gloo_pool, config_file, 2, *MOMENTS, here, stop_after=2)
    for ranks, sizes in ((1, ["parallel.dp=1"]), (3, ["parallel.dp=3"]), (4, ["parallel.pp=2", "parallel.tp=2"])):
        moved = run(gloo_pool, config_file, ranks, *MOMENTS, here, *sizes, stop_after=2)
        assert moved.losses == []
        assert moved.state.keys() == first.state.keys()
        for name, value in first.state.items():
            assert np.array_equal(moved.state[name], value), (sizes, name)
    rest = run(gloo_pool, config_file, 2, *MOMENTS, here)
    whole = run(gloo_pool, config_file, 2, *MOMENTS, f"train.output_dir={tmp_path}/whole")
    assert first.losses + rest.losses == whole.losses
    for name, value in whole.state.items():
        assert np.array_equal(value, rest.state[name]), name
    kinds = {name.rpartition(".")[2]: value.dtype.itemsize for name, value in whole.state.items() if ".mlp." in name}
    assert kinds == {"weight": 2, "exp_avg": 2, "exp_avg_sq": 2, LOWER_HALF: 2}
    with pytest.raises(RuntimeError, match=r"keeps \['exp_avg', 'exp_avg_sq', 'master'\]: .*another optimizer.moments"):
        run(gloo_pool, config_file, 2, "model.dtype=bfloat16", here)


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, ["model.dtype=float64"]),
        (2, ["model.dtype=float32", "train.ema_decay=0.7"]),
        (3, [*MOMENTS, "data.batch_documents=2"]),
    ],
    ids=["float64", "float32 dp2", "bfloat16 dp3, a replica without documents"],
)
def test_updates_in_backward_are_the_same_to_the_bit(gloo_pool, config_file, tmp_path, ranks, settings, is_tied):
    if not is_tied:
        untie(config_file)
    plain = run(gloo_pool, config_file, ranks, *settings, *ONE_PACK, f"train.output_dir={tmp_path}/plain")
    here = [*settings, *IN_BACKWARD, f"train.output_dir={tmp_path}/in_backward"]
    run(gloo_pool, config_file, ranks, *here, stop_after=1)
    rest = run(gloo_pool, config_file, ranks, *here)
    assert len(plain.losses) == STEPS
    assert rest.losses == plain.losses[1:]
    assert_same_training(rest._replace(losses=plain.losses, norms=[plain.norms[0], *rest.norms]), plain, 0)


def outcome_of_small_chunks(*arguments):
    """As `run_outcome`, where state in host memory comes 128 elements at a time, which are whole vectors: what is
    left over of a loop over them is rounded otherwise."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optimizer, "CHUNK_ELEMENTS", 128)
        return run_outcome(*arguments)


@pytest.mark.parametrize(
    ("ranks", "settings", "stages"),
    [
        (1, ["model.dtype=float64"], [0]),
        (2, ["model.dtype=bfloat16", "train.ema_decay=0.7", "parallel.dp=2"], [0]),
        (4, [*MOMENTS, "parallel.pp=2", "parallel.dp=2"], [1]),
        (2, ["model.dtype=float32", "parallel.pp=2"], [0, 1]),
    ],
    ids=["float64", "bfloat16 dp2", "moments of two bytes, last of two stages", "both stages"],
)
def test_state_in_host_memory_is_the_same_to_the_bit(gloo_pool, config_file, tmp_path, ranks, settings, stages):
    """Stopped, and gone on with from the device and back: checkpoints do not know where state lies."""
    offloaded, here = f"optimizer.offload_stages={stages}", f"train.output_dir={tmp_path}/offloaded"
    plain = run(gloo_pool, config_file, ranks, *settings, f"train.output_dir={tmp_path}/plain")
    for stop, more in ((1, [offloaded]), (2, []), (STEPS, [offloaded])):
        overrides = [*settings, here, *more]
        rest = gloo_pool.run(ranks, outcome_of_small_chunks, str(config_file), overrides, 2**34, stop)[0]
    assert rest.losses == plain.losses[2:]
    assert_same_training(rest._replace(losses=plain.losses, norms=[*plain.norms[:2], *rest.norms]), plain, 0)


@pytest.mark.parametrize("size", [1, 99, 100, 101, 1000])
def test_chunks_come_and_go_in_order_however_slow_copies_are(size):
    class Slow(ThreadHostCopies):
        def _copy(self, moves, device_side):
            return self._thread.submit(lambda: (time.sleep(0.002), *(into.copy_(rows) for into, rows in moves))).result

    state = OffloadedState(Slow(), Slow(), torch.device("cpu"))
    first, second = (state.kept(torch.arange(size, dtype=dtype)) for dtype in (torch.float64, torch.float32))
    for step in range(1, 4):
        chunks = [{"a": first[at : at + 100], "b": second[at : at + 100]} for at in range(0, size, 100)]
        state.begin(chunks)
        for _ in chunks:
            taken = state.take()
            for tensor in taken.values():
                tensor.add_(step)
            state.give_back(taken)
    state.synchronize()
    for kept in (first, second):
        assert torch.equal(kept, torch.arange(size, dtype=kept.dtype) + 6)


def held_and_predicted(config_file: str, overrides: list[str]) -> tuple[int, list[int]]:
    """Bytes of one rank's weights, gradients and state, and what the memory model counts of them."""
    trainer = make_trainer(config_file, overrides)
    kinds = static_kinds(trainer.config.with_run_memory(trainer.model), trainer.mesh.layout)
    return trainer.state.static_bytes(), kinds[trainer.mesh.pp_rank].tolist()


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("average", [[], ["train.ema_decay=0.7"]], ids=["", "average"])
@pytest.mark.parametrize(
    "settings", [[], MOMENTS, IN_BACKWARD, [*MOMENTS, *IN_BACKWARD], ["optimizer.offload_stages=[0]"]], ids=str
)
def test_the_memory_model_counts_what_a_rank_holds(gloo_pool, config_file, settings, average, is_tied):
    if not is_tied:
        untie(config_file)
    settings = ["model.dtype=bfloat16", *settings, *average]
    measured, predicted = gloo_pool.run(1, held_and_predicted, str(config_file), settings)[0]
    assert measured == sum(predicted)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["optimizer.moments=bfloat16"], "optimizer.moments is 'bfloat16', and model.dtype is 'float64'"),
        ([*MOMENTS, "optimizer.beta2=0.999"], "optimizer.beta2 is 0.999, must be at most 0.99 with moments"),
        ([*MOMENTS, "optimizer.name=muon"], "optimizer.moments is 'bfloat16', and optimizer.name is 'muon'"),
        ([*MOMENTS, "model.lora={rank=2}"], "optimizer.moments is 'bfloat16', and adapters"),
        (
            [*MOMENTS, "parallel.dp=2", 'plan.layouts=["pp=2"]', "plan.strategy=auto"],
            "optimizer.moments is 'bfloat16', and the layout may",
        ),
        (["optimizer.in_backward=true"], "optimizer.clip_norm is 0.5, must be 0 with in_backward: the norm of all"),
        ([*IN_BACKWARD, "plan.strategy=auto"], "in_backward is true, and plan.strategy is 'auto'"),
        ([*IN_BACKWARD, "plan.options.micro_batches=2"], "plan.options.micro_batches 2, so a step may"),
        ([*IN_BACKWARD, "parallel.pp=2"], r"in_backward is true, and \[parallel\] is pp=2; use dp alone"),
        ([*IN_BACKWARD, "train.on_nonfinite=skip"], "in_backward is true, and train.on_nonfinite is 'skip'"),
        ([*IN_BACKWARD, "optimizer.name=muon"], "in_backward is true, and optimizer.name is 'muon'"),
        ([*IN_BACKWARD, "model.lora={rank=2}"], "in_backward is true, and adapters"),
        ([*IN_BACKWARD, "optimizer.offload_stages=[0]"], r"offload_stages is \[0\], and optimizer.in_backward is true"),
        (
            ["optimizer.name=muon", "optimizer.offload_stages=[0]"],
            r"offload_stages is \[0\], and optimizer.name is 'muon'",
        ),
        (["optimizer.offload_stages=[1]"], r"offload_stages is \[1\], and \[parallel\] \(single\) has stages 0 to 0"),
        (
            ["optimizer.offload_stages=[0]", "parallel.dp=2", "plan.strategy=flexpipe"],
            r"offload_stages is \[0\], and the layout may",
        ),
    ],
)
def test_what_is_not_tested_is_refused_by_name(config_file, settings, message):
    with pytest.raises(ConfigError, match=message):
        require_runnable(load_train_config(config_file, settings))


def test_a_step_of_more_than_one_pack_is_refused_before_it_runs(gloo_pool, config_file):
    with pytest.raises(RuntimeError, match=r"step 0: strategy balanced: a replica has \d+ backward packs"):
        run(gloo_pool, config_file, 1, *IN_BACKWARD, "plan.options.max_pack_tokens=256")


def test_a_step_that_is_not_finite_says_that_weights_were_updated(gloo_pool, config_file):
    (end,) = gloo_pool.run(1, train_with_a_poisoned_token, str(config_file), IN_BACKWARD, ord("7"), None)
    assert "Weights were updated by it (optimizer.in_backward), but nothing was saved" in end.error
    assert "on_nonfinite=skip (without in_backward)" in end.error
