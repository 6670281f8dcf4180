"""Engines of engine_steps.py with a loop of their own: transformers' Trainer, torchtitan."""

# pyright: reportMissingImports=false
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from transformers import LlamaConfig

from engine_turns import Race, ReadySteps, Trained, by_turns, new_model

EXAMPLES = Path(__file__).parent.parent / "examples" / "engines"
MICRO_BATCHES = 4
"""Of every rank and step of the Trainer: what the fullest packs of a global batch need, and one more."""


def train_with_trainer(race: Race) -> list[Trained]:
    """The Trainer's own `train()` under DistributedDataParallel; its batches come from both loaders by turns."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    from evenload.integrations.trainer import PackedTrainerMixin

    ready = {one: race.ready(one, micro_batches=MICRO_BATCHES) for one in race.variants}
    queues = {variant: iter(one.made) for variant, one in ready.items()}
    steps = [next(queues[variant]) for variant in race.turns]
    losses: list[float] = []

    class Turns(PackedTrainerMixin, Trainer):
        def get_train_dataloader(self) -> Any:
            return [batch for step in steps for batch in step]

        def compute_loss(self, *arguments: Any, **settings: Any) -> Any:
            loss = super().compute_loss(*arguments, **settings)
            # Gradients are averaged over processes, so the Trainer multiplies by them.
            losses[-1] += loss.item() / self.accelerator.num_processes
            return loss

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.start_s, self.seconds = 0.0, []

        def on_step_begin(self, *_: Any, **__: Any) -> None:
            dist.barrier()
            losses.append(0.0)
            self.start_s = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start_s)

    clock = Clock()
    with tempfile.TemporaryDirectory() as output:
        args = TrainingArguments(
            output_dir=output, max_steps=len(race.turns), gradient_accumulation_steps=MICRO_BATCHES, learning_rate=0.0,
            max_grad_norm=0.0, save_strategy="no", logging_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
            dataloader_pin_memory=False,
        )  # fmt: skip
        loader = ready[race.baseline].loader
        Turns(new_model(race.config), args, train_loader=loader, callbacks=[clock]).train()
    whole = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(whole)
    return [
        Trained(seconds, loss, race.price(step, ready[variant]))
        for seconds, loss, step, variant in zip(clock.seconds, whole.tolist(), steps, race.turns, strict=True)
    ]


def titan_spec() -> Any:
    """torchtitan's small Llama with two of its layers; imports torchtitan, on CPUs."""
    if str(EXAMPLES) not in sys.path:
        sys.path.insert(0, str(EXAMPLES))
    import torchtitan_on_cpu  # noqa: F401  before torchtitan
    from torchtitan.models.llama3 import model_registry

    spec = model_registry("debugmodel", attn_backend="varlen")
    spec.model.layers = spec.model.layers[:2]
    return spec


def titan_config() -> LlamaConfig:
    """transformers' configuration of the same model, to profile it."""
    spec = titan_spec()
    from evenload.integrations.torchtitan_trainer import model_of

    model = model_of("llama3", spec.model)
    return LlamaConfig(
        vocab_size=model.vocab_size, hidden_size=model.hidden_size, intermediate_size=model.kinds[0].inner,
        num_hidden_layers=model.num_layers, num_attention_heads=model.attentions[0].heads, head_dim=model.head_dim,
        num_key_value_heads=model.attentions[0].kv_heads, pad_token_id=None, bos_token_id=None, eos_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip


def train_torchtitan(race: Race) -> list[Trained]:
    """torchtitan's own `train_step`; its loader is another one from turn to turn."""
    spec = titan_spec()
    import torchtitan_on_cpu
    from torchtitan.components.checkpoint import CheckpointManager
    from torchtitan.components.loss import CrossEntropyLoss
    from torchtitan.components.metrics import MetricsProcessor
    from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
    from torchtitan.config import ParallelismConfig, TrainingConfig
    from torchtitan.trainer import Trainer

    from evenload.data.tokenize import train_byte_pair_tokenizer
    from evenload.integrations.torchtitan_trainer import packed_config

    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it starts the process group
    folder = race.directory / "titan"
    train_byte_pair_tokenizer(["a small text"], 280, folder / "assets" / "tokenizer.json")
    named = {one: race.settings(one) for one in race.variants}
    for settings in named.values():
        # torchtitan's mesh says these.
        for name in ("engine", "equal_micro_batches"):
            settings.pop(name, None)
    longest = named[race.baseline]["max_tokens"]
    config = Trainer.Config(
        model_spec=spec,
        hf_assets_path=str(folder / "assets"),
        dump_folder=str(folder),
        loss=CrossEntropyLoss.Config(),
        optimizer=default_adamw(lr=0.0),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=1, seq_len=longest, steps=1_000_000, mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(enable=False),
        activation_checkpoint=None,
    )  # fmt: skip
    packed = {one: packed_config(config, {"data": race.documents(), **named[one]}) for one in race.variants}
    trainer = torchtitan_on_cpu.on_cpu(packed[race.baseline]).build()
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, loss, *_, **__: losses.append(loss)

    def steps(variant: str) -> Iterator[Trained]:
        sizes = {"dp_world_size": dist.get_world_size(), "dp_rank": dist.get_rank(), "tokenizer": None}
        batches = packed[variant].dataloader.build(**sizes, seq_len=longest, local_batch_size=1)
        ready = ReadySteps(batches.loader, list(race.turns).count(variant))
        batches.loader = SimpleNamespace(steps=ready.steps, has_ended=False, close=batches.loader.close)
        iterator = trainer.batch_generator(batches)
        for step in ready.made:
            trainer.dataloader = batches
            start_s = time.perf_counter()
            trainer.step += 1
            trainer.train_step(iterator)
            yield Trained(time.perf_counter() - start_s, losses[-1], race.price(step, ready))

    return by_turns({one: steps(one) for one in race.variants}, race.turns)
