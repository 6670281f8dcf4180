"""Whole training runs with tensor parallelism: every update equals plain AdamW, checkpoints move between layouts, the
exported model is the trained one, calibration measures a part as a part, a lost peer is named."""

import math
import signal
from pathlib import Path

import msgspec
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from dist_training import train_steps
from evenload.calibrate.calibrate import calibrate
from evenload.config.train_config import layout_of, load_train_config
from evenload.cost.coefficients import CostCoefficients
from evenload.errors import ConfigError
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.configured import load_config, model_spec
from evenload.runtime.trainer import Trainer
from gloo_pool import TIMEOUT_S
from lost_rank_cases import run_rank
from quick_calibration import quick_calibration
from rank_server import rank_context
from sweeps import sweep, thorough
from training_cases import STEPS, plain_losses, write_training_config


@pytest.fixture(scope="module")
def config_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama of 257 words, which do not divide by 2, on documents of very different lengths."""
    directory = tmp_path_factory.mktemp("run")
    corpus = directory / "corpus"
    corpus.mkdir()
    for i in range(40):
        (corpus / f"{i}.txt").write_text(f"document {i} " * (1 + (i * 7) % 13 + (10 if i % 11 == 0 else 0)))
    return write_training_config(directory, corpus, num_layers=4)


@pytest.fixture(scope="module")
def expected_losses(config_file: Path) -> list[float]:
    return plain_losses(load_train_config(config_file, []))


def layout_settings(**sizes: int) -> list[str]:
    return [f"parallel.{name}={value}" for name, value in sizes.items()]


@pytest.mark.parametrize(
    ("sizes", "strategy", "policy"),
    sweep(
        [
            ({"tp": 2, "pp": 2, "virtual": 2}, "slimpack", "replay"),
            ({"tp": 2, "cp": 2}, "skrull", "choose"),
            ({"tp": 2, "dp": 2}, "slimpack", "offload"),
            ({"tp": 2, "pp": 2}, "auto", "recompute"),
            ({"tp": 2}, "best_fit", "choose"),
        ],
        3,
    ),
)
def test_loss_trajectory_equals_plain_adamw(gloo_pool, config_file, expected_losses, tmp_path, sizes, strategy, policy):
    """Parts of matrices, copies of norms and their optimizer shards: two updates with clipping, to 1e-9."""
    overrides = [*layout_settings(**sizes), f"plan.strategy={strategy}", f"plan.options.policy={policy}"]
    overrides.append(f"train.output_dir={tmp_path}")
    world_size = math.prod(size for name, size in sizes.items() if name != "virtual")
    losses = gloo_pool.run(world_size, train_steps, str(config_file), overrides, 2)[0]
    assert losses == pytest.approx(expected_losses[:2], rel=1e-9)


def test_a_checkpoint_moves_between_any_layouts(gloo_pool, config_file, expected_losses, tmp_path):
    """Parts of matrices over tp and ranges of elements over dp: two parts go on as two replicas of whole ones, those as
    a pipeline of parts, that as two replicas of parts."""
    losses = []
    for sizes, stop_after in (
        ({"tp": 2}, 1),
        ({"dp": 2}, 2),
        ({"tp": 2, "pp": 2}, 3),
        ({"tp": 2, "dp": 2}, STEPS),
    ):
        here = [*layout_settings(**sizes), f"train.output_dir={tmp_path}"]
        losses += gloo_pool.run(math.prod(sizes.values()), train_steps, str(config_file), here, stop_after)[0]
    assert losses == pytest.approx(expected_losses, rel=1e-9)


def test_resuming_at_the_same_layout_is_exact(gloo_pool, config_file, tmp_path):
    layout = layout_settings(tp=2, dp=2)
    runs = []
    for name, stops in (("whole", [2]), ("resumed", [1, 2])):
        here = [*layout, f"train.output_dir={tmp_path / name}", "model.dtype=bfloat16"]
        runs.append([n for stop in stops for n in gloo_pool.run(4, train_steps, str(config_file), here, stop)[0]])
    assert runs[0] == runs[1]


def test_the_exported_model_is_that_of_one_rank(gloo_pool, config_file, tmp_path):
    models = []
    for sizes, world_size in (({"tp": 2, "pp": 2}, 4), ({}, 1)):
        here = [*layout_settings(**sizes), f"train.output_dir={tmp_path / str(world_size)}", "train.steps=2"]
        gloo_pool.run(world_size, train_steps, str(config_file), here, 2, True)
        exported = tmp_path / str(world_size) / "model"
        models.append(AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64).state_dict())
    assert models[0].keys() == models[1].keys()
    for name, tensor in models[1].items():
        torch.testing.assert_close(models[0][name], tensor, rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_train_as_on_one_rank(gloo_pool, config_file, tmp_path):
    """Of an adapter the matrix beside the cut is cut, the other one is whole; under policies and split backwards, and
    back from a checkpoint of another tp. (Training on one rank equals peft: test_models_in_and_out.)"""
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


def test_sizes_that_do_not_divide_are_refused_at_start(gloo_pool, config_file):
    """Before a step is planned, on every rank, with the size and the limit."""
    assert set(gloo_pool.run(4, refusal, str(config_file), layout_settings(tp=4))) == {
        "parallel.tp is 4, but num_key_value_heads of the model is 2, which does not divide by it; choose a tp that "
        "divides num_attention_heads 4, num_key_value_heads 2, intermediate_size 80"
    }


def refusal(config_file: str, overrides: list[str]) -> str:
    try:
        make_trainer(config_file, overrides)
    except ConfigError as error:
        return str(error)
    return ""


def make_trainer(config_file: str, overrides: list[str]):
    config = load_train_config(Path(config_file), overrides)
    mesh = create_meshes(
        [layout_of(config.parallel, model_spec(config).num_layers)], torch.device("cpu"), TIMEOUT_S
    ).start
    return Trainer(config, mesh), mesh


def calibrated(config_file: str, overrides: list[str]) -> bytes:
    trainer, mesh = make_trainer(config_file, overrides)
    with quick_calibration():
        return msgspec.json.encode(calibrate(trainer.stages, trainer.model, mesh, 256, "this machine").coefficients)


def test_calibration_measures_parts_and_says_seconds_of_whole_layers(gloo_pool, config_file):
    """All ranks try the same packs, though their clocks differ; transfers are in the layers' seconds, once."""
    found = {}
    for tp in (1, 2):
        ranks = gloo_pool.run(tp, calibrated, str(config_file), layout_settings(tp=tp))
        assert len(set(ranks)) == 1
        found[tp] = msgspec.json.decode(ranks[0], type=CostCoefficients)
    assert found[2].tensor_exposed_share == 0.0
    assert found[2].group_link(2, stride=1).bandwidth_bytes_per_s > 0
    assert found[2].head_s_per_token > 0


@thorough
def test_a_dead_peer_is_named(config_file, tmp_path):
    context = rank_context()
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    arguments = (
        server.port,
        str(tmp_path),
        str(config_file),
        layout_settings(tp=2),
        15.0,
        1,
        "transfer",
        signal.SIGKILL,
    )
    ranks = [context.Process(target=run_rank, args=(rank, *arguments), daemon=True) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(300)
    error = (tmp_path / "error-0.txt").read_text()
    assert error.startswith("RankLostError: rank 0 (dp 0, tp 0, stage 0) waited for embeddings of a forward pack"), (
        error
    )
    assert "from rank 1" in error
