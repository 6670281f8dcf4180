"""`PackedTrainer`: torchtitan's `Trainer` with global batches of a `PackedDataLoader`.

    def my_model() -> PackedTrainer.Config:
        config = llama3_debugmodel_varlen_attn()
        config.training.local_batch_size = 1
        return packed_config(config, {"data": "corpus", "batch_tokens": 262_144})

    torchrun ... -m torchtitan.train --module my_package.configs --config my_model

What differs from torchtitan's own trainer: a step makes as many micro-batches as its plan has (the same number on all
ranks, another one from step to step), each a pack of its own length. All else is torchtitan's: it counts the tokens
with a loss over all data-parallel ranks and divides the *sum* of the losses by them, so loss and gradients are those of
one document after the other, however they are packed.

Tried with torchtitan 0.3.0 ([1, T]); what it cannot do, or has not been tried, is refused at start. What torchtitan
logs as `global_max_loss`, the largest mean loss of a rank, is nan in a step where a rank has nothing with a loss.
"""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from evenload.errors import ConfigError
from evenload.integrations.batch_formats import resolve_format

# First, because its error says how to install what is missing.
from evenload.integrations.engines.torchtitan_loader import PackedDataLoader  # isort: split

from torchtitan.components.loss import ChunkedLossWrapper  # type: ignore[missing-import]
from torchtitan.models.common.attention import FlexAttention, VarlenAttention  # type: ignore[missing-import]
from torchtitan.tools.logging import logger  # type: ignore[missing-import]
from torchtitan.trainer import Trainer  # type: ignore[missing-import]

from evenload.integrations.engines.torchtitan_model import model_of


class PackedTrainer(Trainer):
    """See the module.

    Args:
        config: its `dataloader` is a `PackedDataLoader.Config`; `packed_config` makes one of any of torchtitan's.

    Raises:
        ConfigError: a setting under which packs would not train, or train something else, with the fix.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """torchtitan's, under a name of its own, because torchtitan builds the class in which `Config` stands."""

    def __init__(self, config: Any) -> None:
        refuse_config(config)
        super().__init__(config)
        loader = self.dataloader.loader
        if loader.model_is_assumed:
            try:
                loader.balance_for(model_of(config.model_spec.name, config.model_spec.model))
            except ConfigError as err:
                logger.warning("packs are not balanced for the model that is trained: %s", err)

    def train_step(self, data_iterator: Any) -> None:
        """One optimizer step of as many micro-batches as the plan has."""
        self.gradient_accumulation_steps = self.dataloader.begin_step()
        super().train_step(data_iterator)


def packed_config(config: Any, loader: dict[str, Any]) -> Any:
    """One of torchtitan's trainer configurations with our loader.

    Args:
        config: a `Trainer.Config`, such as a function of a `config_registry` gives, or a `PackedTrainer.Config` or one
            derived from it.
        loader: arguments of `PackedLoader`; see `PackedDataLoader.Config`. `pack_multiple`, where it is left out, is
            the number of chunks into which torchtitan's `ChunkedLossWrapper` cuts the tokens.

    Returns:
        `PackedTrainer.Config`, or of the type that was given; all else as it was.

    Raises:
        ConfigError: of another trainer, which `PackedTrainer` would replace.
    """
    settings = {"pack_multiple": _loss_chunks(config)} | loader
    if isinstance(config, PackedTrainer.Config):
        own: Any = config  # its fields are torchtitan's
        return replace(own, dataloader=PackedDataLoader.Config(loader=settings))
    if type(config) is not Trainer.Config:
        raise ConfigError(
            f"{type(config).__qualname__} is the configuration of another trainer than torchtitan's Trainer, and "
            "PackedTrainer would train without what is its own; derive that trainer from PackedTrainer, its Config "
            "from PackedTrainer.Config, and give packed_config one of these"
        )
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return PackedTrainer.Config(**values | {"dataloader": PackedDataLoader.Config(loader=settings)})


def refuse_config(config: Any) -> None:
    """A `ConfigError` for what would not train, or would train something else."""
    if resolve_format("torchtitan") != "torchtitan_batched":
        raise ConfigError(
            "the installed torchtitan takes batches of shape [T], and PackedTrainer is tried with its release 0.3.0, "
            "which takes [1, T]; PackedDataLoader.Config alone gives either shape, with loader['micro_batches'] equal "
            "to the trainer's number of micro-batches a step"
        )
    if not isinstance(config.dataloader, PackedDataLoader.Config):
        raise ConfigError(
            f"dataloader is a {type(config.dataloader).__qualname__}; give PackedDataLoader.Config(loader={{...}}), or "
            "make the configuration with packed_config"
        )
    training = config.training
    if training.local_batch_size != 1 or training.global_batch_size != -1:
        raise ConfigError(
            f"training.local_batch_size is {training.local_batch_size} and global_batch_size "
            f"{training.global_batch_size}; a micro-batch is one pack, and the plan says how many a step has: set "
            "local_batch_size = 1, leave global_batch_size at -1, and give loader={'batch_tokens': ...}"
        )
    multiple, chunks = config.dataloader.loader.get("pack_multiple", 1), _loss_chunks(config)
    if multiple % chunks:
        raise ConfigError(
            f"loader['pack_multiple'] is {multiple}, and ChunkedLossWrapper cuts a pack into {chunks} equal parts; set "
            f"loader['pack_multiple'] = {chunks}, or take the loss that it wraps"
        )
    if not training.disable_cuda_graphs and torch.cuda.is_available():
        raise ConfigError(
            "training.disable_cuda_graphs is off: a CUDA graph replays one shape, and packs differ in length; set it "
            "to True"
        )
    _refuse_parallelism(config.parallelism)
    _refuse_attention(config.model_spec)


def _loss_chunks(config: Any) -> int:
    """Equal parts into which the loss cuts the tokens of a micro-batch."""
    return config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1


def _refuse_parallelism(parallelism: Any) -> None:
    reasons = {
        "pipeline_parallel_degree": "its stages exchange tensors of one shape; Megatron-Core pipelines packs of any "
        "length (evenload.integrations.engines.megatron_step), and 'evenload train' does",
        "context_parallel_degree": "it cuts every micro-batch across ranks by one mask of a fixed length; "
        "'evenload train' shares long documents",
        "tensor_parallel_degree": "not tried with packs; use data-parallel ranks (data_parallel_shard_degree)",
        "expert_parallel_degree": "not tried with packs; use data-parallel ranks (data_parallel_shard_degree)",
    }
    for name, reason in reasons.items():
        if getattr(parallelism, name) > 1:
            raise ConfigError(f"parallelism.{name} is {getattr(parallelism, name)}: {reason}. Leave it at 1")


def _refuse_attention(model_spec: Any) -> None:
    """Documents of a pack must not see each other, in any layer."""
    layers = getattr(model_spec.model, "layers", None)
    if not layers:
        raise ConfigError(
            f"{model_spec.name} ({type(model_spec.model).__qualname__}) has no layers to look at, so nothing says that "
            'documents of a pack would not see each other; take a decoder with attn_backend "flex" or "varlen"'
        )
    masked = (FlexAttention.Config, VarlenAttention.Config)
    for index, layer in enumerate(layers):
        inner = getattr(getattr(layer, "attention", None), "inner_attention", None)
        if not isinstance(inner, masked):
            kind = "no attention that is known" if inner is None else type(inner).__qualname__
            raise ConfigError(
                f"layer {index} of {model_spec.name} has {kind}, which knows no documents, so that those of a pack "
                'would see each other; take a model with attn_backend "flex" or "varlen" in all layers'
            )
