"""Muon and the moving average of weights: as plain torch, under layouts, in checkpoints; what is refused."""

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from dist_training import run_outcome, whole_state
from evenload.cli.worker_setup import require_runnable
from evenload.config.train_config import TrainConfig, layout_of, load_train_config
from evenload.errors import ConfigError
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.model_config import load_config, model_spec
from evenload.runtime.optim.data_parallel import flatten_units
from evenload.runtime.optim.optimizer import ShardedOptimizer, orthogonalised
from gloo_pool import TIMEOUT_S
from reference_training import stage_model
from training_cases import STEPS, UNEVEN_TEXTS, plain_losses, plain_model, plain_optimizers, write_training_config
from validation_cases import averaged_export, plain_validation


def given_gradient(name: str, shape: Iterable[int], step: int) -> torch.Tensor:
    """Of a parameter in a step, fp32; the same everywhere."""
    seed = step * 1_000_003 + sum(map(ord, name)) * 101 + len(name)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.1


def updated_in_bf16(config_file: str, overrides: list[str]) -> dict[str, np.ndarray]:
    """All tensors after the configured steps; of data-parallel ranks. bf16 as its bits."""
    config = load_train_config(Path(config_file), overrides)
    hf = load_config(config.model.path)
    layout = layout_of(config.parallel, model_spec(config).num_layers)
    mesh = create_meshes([layout], torch.device("cpu"), TIMEOUT_S).start
    buffers = flatten_units(stage_model(hf, torch.bfloat16, seed=0), mesh.data_size)
    optimizer = ShardedOptimizer(buffers, mesh, config.optimizer, average_decay=config.train.ema_decay)
    for step in range(config.train.steps or 0):
        for buffer in buffers:
            at = 0
            for name, parameter in zip(buffer.names, buffer.parameters, strict=True):
                gradient = given_gradient(name, parameter.shape, step).flatten()
                buffer.grads[at : at + gradient.numel()] = gradient
                at += gradient.numel()
        squares = sum(float(buffer.grads[: buffer.num_elements].double().square().sum()) for buffer in buffers)
        shards = [buffer.shard(buffer.grads, mesh.data_rank, mesh.data_size).clone() for buffer in buffers]
        optimizer.step(shards, squares**0.5, config.optimizer.rate(step, config.train.steps))
    optimizer.gathers.finish()
    return whole_state(SimpleNamespace(mesh=mesh, buffers=buffers, optimizer=optimizer))


def plainly_updated(config: TrainConfig) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The same by torch.optim on whole fp32 master weights: (these, their moving average), by name."""
    assert config.train.ema_decay is not None
    masters = plain_model(config, torch.bfloat16).float()
    named = dict(masters.named_parameters())
    averages = {name: parameter.detach().clone() for name, parameter in named.items()}
    optimizers = plain_optimizers(masters, config)
    for step in range(config.train.steps or 0):
        for name, parameter in named.items():
            parameter.grad = given_gradient(name, parameter.shape, step)
        torch.nn.utils.clip_grad_norm_(masters.parameters(), config.optimizer.clip_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = config.optimizer.rate(step, config.train.steps)
            optimizer.step()
        for name, parameter in named.items():
            averages[name].lerp_(parameter.detach(), 1 - config.train.ema_decay)
    return {name: parameter.detach() for name, parameter in named.items()}, averages


MUON = "optimizer.name=muon"
LIVE = ["parallel.dp=2", 'plan.layouts=["pp=2"]', "plan.strategy=auto"]
DECAY = 0.7


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    return write_training_config(tmp_path, UNEVEN_TEXTS, num_layers=3)


def run(gloo_pool, config_file: Path, ranks: int, *settings: str, stop_after: int = STEPS):
    return gloo_pool.run(ranks, run_outcome, str(config_file), list(settings), 2**34, stop_after)[0]


@pytest.mark.parametrize(("rows", "columns"), [(24, 10), (10, 24), (16, 16)])
def test_orthogonalised_is_what_torch_makes_of_it_and_nearly_orthogonal(rows, columns):
    matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))
    theirs = torch.optim._muon._zeropower_via_newtonschulz(matrix, (3.4445, -4.7750, 2.0315), 5, 1e-7)
    assert torch.equal(orthogonalised(matrix), theirs.float())
    values = torch.linalg.svdvals(orthogonalised(matrix.double()))
    assert values.min() > 0.4
    assert values.max() < 1.4


def exact_newton_schulz(matrix, coefficients, steps, eps):
    """torch's rounds to bfloat16."""
    return orthogonalised(matrix)


def test_muon_trains_as_torch_s_and_goes_on_under_another_layout(gloo_pool, config_file, tmp_path, monkeypatch):
    """Matrices of layers that lie across the edges of shards are whole where it takes them."""
    config = load_train_config(config_file, [MUON])
    monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", exact_newton_schulz)
    expected = plain_losses(config)
    whole = run(gloo_pool, config_file, 4, MUON, "parallel.pp=2", "parallel.dp=2", f"train.output_dir={tmp_path}/a")
    assert whole.losses == pytest.approx(expected, rel=1e-9)
    moved = f"train.output_dir={tmp_path}/b"
    first = run(gloo_pool, config_file, 3, MUON, "parallel.dp=3", moved, stop_after=2)
    rest = run(gloo_pool, config_file, 2, MUON, "parallel.cp=2", moved)
    assert first.losses + rest.losses == pytest.approx(expected, rel=1e-9)
    kinds = {name.rpartition(".")[2] for name in rest.state if name.startswith("optimizer.model.layers.0.mlp")}
    assert kinds == {"momentum"}


def test_the_average_of_weights_is_in_checkpoints_validated_and_exported(gloo_pool, config_file, tmp_path):
    held_out = tmp_path / "held_out"
    held_out.mkdir()
    (held_out / "a.txt").write_text("something else " * 5)
    averaged = [
        *(f"train.ema_decay={DECAY}", f"validation.sources=['{held_out}']", "validation.of_average=true"),
        *("parallel.pp=2", "parallel.dp=2"),
    ]
    averages: dict[str, torch.Tensor] = {}

    def average(model: torch.nn.Module) -> None:
        for name, parameter in model.named_parameters():
            averages[name].lerp_(parameter.detach(), 1 - DECAY)

    config = load_train_config(config_file, averaged)
    averages |= initial_weights(config_file)
    expected = plain_losses(config, average)

    here = f"train.output_dir={tmp_path}/resumed"
    first = run(gloo_pool, config_file, 4, *averaged, here, stop_after=2)
    rest = run(gloo_pool, config_file, 4, *averaged, here)
    whole = run(gloo_pool, config_file, 4, *averaged, f"train.output_dir={tmp_path}/whole")
    assert first.losses + rest.losses == whole.losses == pytest.approx(expected, rel=1e-9)
    for name, value in whole.state.items():
        assert np.array_equal(value, rest.state[name]), f"{name} survives a checkpoint to the bit"
    averaged_state = {name: value for name, value in whole.state.items() if ".average" in name}
    result = {n.removeprefix("optimizer.").removesuffix(".average"): value for n, value in averaged_state.items()}
    for name, value in result.items():
        assert value == pytest.approx(averages[name].numpy(), rel=1e-9, abs=1e-12), name
    assert len(result) == len(averages)

    (validation,) = whole.validations
    assert validation.of_average
    plain = plain_validation(config_file, averaged, {f"model.{name}": value for name, value in result.items()})
    assert validation.loss == pytest.approx(sum(p.loss for p in plain) / sum(p.labels for p in plain), rel=1e-10)

    path, is_same = gloo_pool.run(4, averaged_export, str(config_file), [*averaged, here])[0]
    assert is_same, "the weights are what they were, to the bit"
    exported = AutoModelForCausalLM.from_pretrained(path).state_dict()
    for name in result:
        assert np.array_equal(exported[name].numpy(), rest.state[f"optimizer.{name}.average"]), name


BF16 = ["model.dtype=bfloat16", f"train.ema_decay={DECAY}"]


def as_bf16(bits: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(bits).view(torch.bfloat16)


@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_updates_of_bf16_weights_are_torch_s_of_fp32_masters(gloo_pool, config_file, name):
    """Gradients are given; not clipped: a last bit of the norm is a bit of bfloat16 in products of Newton-Schulz."""
    settings = [*BF16, "parallel.dp=2", f"optimizer.name={name}", "optimizer.weight_decay=0.1"]
    settings.append("optimizer.clip_norm=1e9")
    result, same = gloo_pool.run(2, updated_in_bf16, str(config_file), settings)
    masters, averages = plainly_updated(load_train_config(config_file, settings))
    for kind, expected in (("master", masters), ("average", averages)):
        assert {n for n in result if n.endswith(f".{kind}")} == {f"optimizer.{n}.{kind}" for n in expected}
        for n, value in expected.items():
            assert result[f"optimizer.{n}.{kind}"] == pytest.approx(value.numpy(), rel=1e-6, abs=1e-7), (kind, n)
    kept = {n: (torch.from_numpy(result[f"optimizer.{n}.master"]), as_bf16(result[f"model.{n}"])) for n in masters}
    for n, (master, weights) in kept.items():
        assert torch.equal(weights, master.bfloat16()), n
    assert any(not torch.equal(master, weights.float()) for master, weights in kept.values())
    moments = {n.rpartition(".")[2] for n in result if ".layers.0.mlp" in n and n.startswith("optimizer.")}
    assert moments == {"master", "average"} | ({"momentum"} if name == "muon" else {"exp_avg", "exp_avg_sq"})
    assert all(np.array_equal(result[n], same[n]) for n in result), "ranks agree to the bit"


def initial_weights(config_file: Path) -> dict[str, torch.Tensor]:
    result: dict[str, torch.Tensor] = {}
    still = load_train_config(config_file, ["train.steps=1", "optimizer.learning_rate=1e-30"])
    plain_losses(still, lambda model: result.update({n: p.detach().clone() for n, p in model.named_parameters()}))
    return result


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ([MUON, "parallel.tp=2"], "optimizer.name is 'muon', and parallel.tp is 2: it orthogonalises whole matrices"),
        ([MUON, "model.lora={rank=2}"], "adapters .* are trained, which is not tested"),
        ([MUON, *LIVE], "optimizer.name is 'muon', and the layout may change while the run trains"),
        (["train.ema_decay=0.9", *LIVE], "train.ema_decay is 0.9, and the layout"),
        (["train.ema_decay=1.0"], "train.ema_decay is 1.0, must be above 0 and below 1"),
        (["optimizer.name=adamw_8bit"], "for a smaller state set optimizer.moments = .bfloat16."),
        (["optimizer.name=muno"], "did you mean 'muon'"),
        (["optimizer.momentum=1.0"], "optimizer.momentum is 1.0"),
        (["validation.sources=['x']", "validation.of_average=true"], "train.ema_decay is not set"),
    ],
)
def test_what_is_not_tested_is_refused_by_name(config_file, settings, message):
    with pytest.raises(ConfigError, match=message):
        require_runnable(load_train_config(config_file, settings))


def test_a_checkpoint_of_another_optimizer_is_refused_with_what_it_has(gloo_pool, config_file, tmp_path):
    """Also where the run would drop a part of it."""
    averaged, muon = ["train.ema_decay=0.9"], [MUON]
    for saved, settings, result, kept in (
        ([], muon, "'exp_avg'", "'momentum'"),
        ([], averaged, "'exp_avg'", "'average'"),
        (averaged, [], "'average'", "'exp_avg'"),
    ):
        here = f"train.output_dir={tmp_path}/saved{len(saved)}"
        run(gloo_pool, config_file, 1, here, *saved, stop_after=1)
        with pytest.raises(RuntimeError, match=rf"has \[.*{result}.*\] of .*, this run's optimizer keeps \[.*{kept}"):
            run(gloo_pool, config_file, 1, here, *settings, stop_after=2)
