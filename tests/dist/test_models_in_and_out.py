"""Hugging Face and PEFT directories in and out of a run, for every architecture; runs that train adapters.

Llama's way in and out is in test_training.py; Mistral, Qwen2 and Qwen3 differ from it in no name.
"""

from pathlib import Path

import peft
import pytest
import torch
from safetensors import safe_open
from torch import nn
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from dist_training import train_steps
from evenload.config.train_config import load_train_config
from evenload.data.loader import GlobalBatchLoader
from evenload.runtime.model.model_config import load_config
from reference_training import stage_model, tiny_config
from training_cases import loss_of, write_training_config

# peft asks transformers by an old name.
pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
KINDS = ["gpt2", "gemma", "gemma2", "gemma3", "olmo2", "mixtral", "qwen3_moe"]
LORA = ["model.lora={rank=3, alpha=6.0}", "train.steps=4"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """Short documents of very different lengths."""
    texts = (f"document {i} " * (1 + (i * 7) % 3 + (5 if i % 11 == 0 else 0)) for i in range(30))
    return write_training_config(tmp_path, texts)


def save_random_model(kind: str, directory: Path, **changes) -> nn.Module:
    torch.manual_seed(11)
    # Gemma's and GPT-2's are always tied on the Hub, others seldom.
    model = AutoModelForCausalLM.from_config(
        tiny_config(kind, vocab_size=257, tied=kind.startswith(("gemma", "gpt2")), **changes), dtype=torch.float64
    )
    model.save_pretrained(directory)
    return model


def tensor_names(directory: Path) -> set[str]:
    names = set()
    for file in directory.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names |= set(tensors.keys())
    return names


def batches_of(config, count: int) -> list:
    loader = GlobalBatchLoader(config.data)
    return [loader.next_batch() for _ in range(count)]


@pytest.mark.parametrize("kind", KINDS)
def test_directories_in_and_out(gloo_pool, config_file, tmp_path, kind):
    """Two stages train and export it; transformers loads it under the same names, and its loss is the run's next."""
    original = save_random_model(kind, tmp_path / "original")
    base = [f"model.path={tmp_path / 'original'}", "model.random_init=false", "parallel.pp=2"]
    if kind in ("mixtral", "qwen3_moe"):
        base.append("model.router_aux_loss_coef=0.0")
    config = load_train_config(config_file, base)
    first, second = batches_of(config, 2)
    losses = gloo_pool.run(2, train_steps, str(config_file), base, 1, True)[0]
    assert losses == pytest.approx([loss_of(original, first)], rel=1e-10)

    exported = tmp_path / "run" / "model"
    assert tensor_names(exported) == tensor_names(tmp_path / "original")
    trained = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    assert loss_of(trained, second) != pytest.approx(loss_of(original, second), rel=1e-4), "it was really trained"
    continued = gloo_pool.run(2, train_steps, str(config_file), base, 2)[0]
    assert continued == pytest.approx([loss_of(trained, second)], rel=1e-10)


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe"])
def test_fused_experts_are_read_too(tmp_path, kind):
    """A directory may also hold the tensors that transformers fuses in memory."""
    from safetensors.torch import save_file

    model = save_random_model(kind, tmp_path / "original")
    fused = tmp_path / "fused"
    fused.mkdir()
    save_file({n: p.detach().clone() for n, p in model.named_parameters()}, fused / "model.safetensors")
    config = load_config(str(tmp_path / "original"))
    result = [stage_model(config, layers=(1, 3), weights=str(one)) for one in (tmp_path / "original", fused)]
    expected = dict(model.named_parameters())
    for stage in result:
        for named in stage.unit_parameters():
            for name, parameter in named:
                assert torch.equal(parameter, expected[name]), name


# ---- adapters ----------------------------------------------------------------------------------------


def plain_adapter_losses(config, directory: Path, steps: int) -> tuple[list[float], peft.PeftModel]:
    """`peft` and torch's AdamW on the same batches."""
    base = AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64)
    model = peft.PeftModel.from_pretrained(base, directory, is_trainable=True, autocast_adapter_dtype=False)
    o = config.optimizer
    trained = [p for p in model.parameters() if p.requires_grad]
    adamw = torch.optim.AdamW(trained, betas=(o.beta1, o.beta2), eps=o.eps, weight_decay=o.weight_decay, fused=True)
    losses = []
    for step, batch in enumerate(batches_of(config, steps)):
        total, labels = torch.zeros((), dtype=torch.float64), sum(one.num_label_tokens for one in batch.documents)
        for tokens in batch.tokens.values():
            row = torch.from_numpy(tokens).long()
            logits = model(row[None]).logits[0, :-1]
            total = total + nn.functional.cross_entropy(logits, row[1:], reduction="sum") / labels
        adamw.zero_grad()
        total.backward()
        nn.utils.clip_grad_norm_(trained, o.clip_norm)
        for group in adamw.param_groups:
            group["lr"] = o.rate(step, config.train.steps)
        adamw.step()
        losses.append(total.item())
    return losses, model


def test_adapters_train_like_peft_resume_and_come_back(gloo_pool, config_file, tmp_path):
    """Losses equal peft's with AdamW; resumed to the bit; the exported adapter is the trained one."""
    save_random_model("llama", tmp_path / "original")
    base = [f"model.path={tmp_path / 'original'}", "model.random_init=false", *LORA]
    start = [*base, f"train.output_dir={tmp_path / 'start'}", "optimizer.learning_rate=1e-30"]
    gloo_pool.run(1, train_steps, str(config_file), start, 1, True)  # writes the adapter that a run begins with

    config = load_train_config(config_file, base)
    expected, plain = plain_adapter_losses(config, tmp_path / "start" / "adapter", 4)
    layout = [*base, "parallel.pp=2", "parallel.dp=2"]
    there = [*layout, f"train.output_dir={tmp_path / 'whole'}"]
    whole = gloo_pool.run(4, train_steps, str(config_file), there, 4, True)[0]
    assert whole == pytest.approx(expected, rel=1e-9)
    assert whole[-1] < whole[0]
    resumed = []
    for stop in (2, 4):
        here = [*layout, f"train.output_dir={tmp_path / 'resumed'}"]
        resumed += gloo_pool.run(4, train_steps, str(config_file), here, stop)[0]
    assert resumed == whole
    other = [*base, "parallel.dp=3", f"train.output_dir={tmp_path / 'resumed'}", "train.steps=5"]
    assert len(gloo_pool.run(3, train_steps, str(config_file), other, 5)[0]) == 1

    result = peft.PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(config.model.path, dtype=torch.float64),
        tmp_path / "whole" / "adapter",
        autocast_adapter_dtype=False,
    )
    tokens = torch.arange(40)[None]
    torch.testing.assert_close(result(tokens).logits, plain(tokens).logits, rtol=1e-9, atol=1e-9)
    assert not (tmp_path / "whole" / "model").exists()
    metadata = FileSystemReader(tmp_path / "whole" / "checkpoints" / "step-00000004").read_metadata()
    tensors = [name for name in metadata.state_dict_metadata if name.startswith("model.")]
    assert tensors
    assert all(".lora_" in name for name in tensors)
