"""`PackedTrainer`: torchtitan's `Trainer` with global batches of a `PackedLoader`, by way of `PackedDataLoader`.

    def my_model() -> PackedTrainer.Config:
        config = llama3_debugmodel_varlen_attn()
        config.training.local_batch_size = 1
        return packed_config(config, {"data": "corpus", "batch_tokens": 262_144})

    torchrun ... -m torchtitan.train --module my_package.configs --config my_model

torchtitan divides the *sum* of the losses by the label tokens of all data-parallel ranks, so loss and gradients are
those of one document after the other. Attention reads where documents begin from `positions`. A step in which a rank
has nothing with a loss logs nan as `global_max_loss`. Tested with torchtitan 0.3.0.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

import torch
import torch.distributed as dist

from evenload.errors import ConfigError, DataError
from evenload.integrations.engine_loop import balance_for_trained, require_place
from evenload.integrations.packed_loader import PackedLoader, PackedStep, without_loss
from evenload.types.model import ModelSpec, alike_model

try:
    import tyro  # type: ignore[missing-import]
    from torchtitan.components.dataloader import (  # type: ignore[missing-import]
        BaseDataLoader,
        DataloaderExhaustedError,
    )
    from torchtitan.components.loss import ChunkedLossWrapper  # type: ignore[missing-import]
    from torchtitan.models.common.attention import FlexAttention, VarlenAttention  # type: ignore[missing-import]
    from torchtitan.trainer import Trainer  # type: ignore[missing-import]
except ImportError as err:
    raise ConfigError(
        f"torchtitan cannot be imported ({err}); install it: pip install 'evenload[torchtitan]'. Its batches alone "
        'need no torchtitan: PackedLoader(format="torchtitan")'
    ) from err

_STATE = "evenload"
_OF_TORCHTITAN = {
    **dict.fromkeys(("rank", "world_size", "group"), "torchtitan's mesh defines which ranks share a global batch"),
    **dict.fromkeys(("engine", "format", "equal_micro_batches"), "torchtitan determines it"),
    "evaluation": "not tested with torchtitan's Validator, which takes a loader of its own in validator.dataloader",
}
_PARALLEL = {
    "pipeline_parallel_degree": "its stages exchange tensors of one shape; use engine megatron or 'evenload train'",
    "context_parallel_degree": "it cuts every micro-batch by one mask of fixed length; use 'evenload train'",
    **dict.fromkeys(("tensor_parallel_degree", "expert_parallel_degree"), "not tested; use data-parallel ranks"),
}


class PackedDataLoader(BaseDataLoader):
    """Gives the micro-batches of this data-parallel rank, epoch after epoch. Collective in training. The default
    tokeniser is torchtitan's; of the sizes of its batches `seq_len` is read."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):
        """
        Args:
            loader: arguments of `PackedLoader`. `max_tokens` is torchtitan's sequence length where it is left out.
        """

        loader: Annotated[dict[str, Any], tyro.conf.Suppress] = field(default_factory=dict)

    def __init__(self, config: Any, *, dp_world_size: int, dp_rank: int, tokenizer: Any = None, **sizes: Any) -> None:
        settings = _loader_settings(config.loader, tokenizer, sizes)
        together = dist.is_initialized() and dp_world_size == dist.get_world_size()
        # With tensor or pipeline ranks the group that shares a batch is not known, so each rank reads by itself.
        place: dict[str, Any] = {} if together else {"rank": dp_rank, "world_size": dp_world_size}
        self.loader = PackedLoader(**(settings | place))
        require_place(self.loader, dp_rank, dp_world_size, "torchtitan's mesh has", "this mesh is not supported")
        self._step: PackedStep | None = None
        self._given = 0

    def begin_step(self) -> int:
        """Make the next step ready; return how many micro-batches it has left, the same on all ranks. Raises a
        `DataloaderExhaustedError` at the end of the data, a `DataError` where nothing in the step has a loss."""
        if (step := self._next_step()) is None:
            raise DataloaderExhaustedError
        if not step.num_label_tokens:
            raise DataError(f"{without_loss(step.plan)}, by whose number torchtitan divides; check the labels")
        return len(step) - self._given

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        while (step := self._next_step()) is not None:
            inputs, labels = step.batches[self._given]
            self._given += 1
            # A new dictionary, because torchtitan writes the tensors on the device back into it.
            yield {"input": inputs["input"], "positions": inputs["positions"]}, labels

    def state_dict(self) -> dict[str, Any]:
        """Return where the loader stands between two steps, in one string; the same on all ranks."""
        if self._step is not None and self._given < len(self._step):
            place = f"step {self._step.plan.step}, after {self._given} of {len(self._step)} micro-batches"
            raise ConfigError(f"state_dict() in {place}; save between two steps")
        return {_STATE: json.dumps(self.loader.state_dict())}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go on where the state was made, also with other ranks; a `ConfigError` for one of other data or loaders."""
        if _STATE not in state_dict:
            fix = 'to train on from its weights alone set checkpoint.exclude_from_loading = ["dataloader"]'
            raise ConfigError(f"the checkpoint's loader has keys {sorted(state_dict)}, so it is none of ours; {fix}")
        self.loader.load_state_dict(json.loads(state_dict[_STATE]))
        self._step, self._given = None, 0

    def close(self) -> None:
        """End threads and worker processes."""
        self.loader.close()

    def _next_step(self) -> PackedStep | None:
        """Return the step that has micro-batches left, or the next one."""
        if self._step is None or self._given >= len(self._step):
            self._step, self._given = next(self.loader.steps(), None), 0
            if self._step is None and not self.loader.has_ended:
                self._step = next(self.loader.steps(), None)
        return self._step


def _loader_settings(given: dict[str, Any], tokenizer: Any, sizes: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of the `PackedLoader` but for its place."""
    for name, reason in _OF_TORCHTITAN.items():
        if name in given:
            raise ConfigError(f"loader[{name!r}] is not yours to set: {reason}; leave it out")
    if "data" not in given:
        raise ConfigError('PackedDataLoader needs loader={"data": ...}, what PackedLoader reads')
    if (longest := sizes.get("seq_len")) is None:
        raise ConfigError(f"this torchtitan builds its loader with {sorted(sizes)}, without seq_len; install 0.3.0")
    if (longer := given.get("max_tokens", longest)) > longest:
        fix = f"set training.seq_len = {longer}"
        raise ConfigError(f"max_tokens is {longer}, torchtitan has {longest} positions; {fix}")
    path = getattr(tokenizer, "tokenizer_path", None)
    return {"max_tokens": longest, "engine": "torchtitan"} | ({} if path is None else {"tokenizer": path}) | given


class PackedTrainer(Trainer):
    """Trains torchtitan's models on the packs of a `PackedDataLoader`, with a configuration of `packed_config`; a
    `ConfigError` where packs would not train, or train something else."""

    @dataclass(kw_only=True, slots=True)
    class Config(Trainer.Config):
        """Names torchtitan's configuration anew, because torchtitan builds the class in which `Config` is."""

    def __init__(self, config: Any) -> None:
        refuse_config(config)
        super().__init__(config)
        spec = config.model_spec
        balance_for_trained(self.dataloader.loader, self.model_parts[0], lambda: model_of(spec.name, spec.model))

    def train_step(self, data_iterator: Any) -> None:
        """Run one optimizer step with the micro-batches of its plan."""
        self.gradient_accumulation_steps = self.dataloader.begin_step()
        super().train_step(data_iterator)


def packed_config(config: Any, loader: dict[str, Any]) -> Any:
    """Return one of torchtitan's trainer configurations with a `PackedDataLoader`.

    Args:
        config: a `Trainer.Config`, or a `PackedTrainer.Config` or one derived from it, whose type then stays. A
            `ConfigError` for the configuration of another trainer, which `PackedTrainer` would replace.
        loader: arguments of `PackedLoader`; default of `pack_multiple`: chunks of torchtitan's `ChunkedLossWrapper`.
    """
    settings = {"pack_multiple": _loss_chunks(config)} | loader
    if isinstance(config, PackedTrainer.Config):
        own: Any = config  # its fields are torchtitan's
        return replace(own, dataloader=PackedDataLoader.Config(loader=settings))
    if type(config) is not Trainer.Config:
        name, fix = type(config).__qualname__, "derive it and its Config from PackedTrainer and its Config"
        raise ConfigError(f"{name} is the configuration of another trainer; {fix}")
    values = {field.name: getattr(config, field.name) for field in fields(config)}
    return PackedTrainer.Config(**values | {"dataloader": PackedDataLoader.Config(loader=settings)})


def refuse_config(config: Any) -> None:
    """Raise a `ConfigError` for what would not train, or would train something else."""
    for message in _untrainable(config):
        raise ConfigError(message)


def _loss_chunks(config: Any) -> int:
    """Return into how many equal parts the loss cuts the tokens of a micro-batch."""
    return config.loss.num_chunks if isinstance(config.loss, ChunkedLossWrapper.Config) else 1


def _untrainable(config: Any) -> Iterator[str]:
    if not isinstance(config.dataloader, PackedDataLoader.Config):
        yield f"dataloader is a {type(config.dataloader).__qualname__}; make the configuration with packed_config"
        return
    training = config.training
    if not hasattr(training, "local_batch_size"):
        yield "torchtitan's training has no local_batch_size: its batches are not [1, T]; install torchtitan==0.3.0"
        return
    if training.local_batch_size != 1 or training.global_batch_size != -1:
        sizes = f"local_batch_size is {training.local_batch_size}, global_batch_size {training.global_batch_size}"
        fix = "set local_batch_size = 1, leave global_batch_size at -1, and give loader={'batch_tokens': ...}"
        yield f"training.{sizes}; a micro-batch is one pack: {fix}"
    multiple, chunks = config.dataloader.loader.get("pack_multiple", 1), _loss_chunks(config)
    if multiple % chunks:
        cut = f"ChunkedLossWrapper cuts a pack into {chunks} equal parts"
        yield f"loader['pack_multiple'] is {multiple}, and {cut}; set loader['pack_multiple'] = {chunks}"
    if not training.disable_cuda_graphs and torch.cuda.is_available():
        yield "training.disable_cuda_graphs is off: a CUDA graph replays one shape, and packs differ in length; set it"
    for name, reason in _PARALLEL.items():
        if (degree := getattr(config.parallelism, name)) > 1:
            yield f"parallelism.{name} is {degree}: {reason}. Leave it at 1"
    model_spec = config.model_spec
    fix = 'take a decoder with attn_backend "flex" or "varlen" in all layers'
    layers = getattr(model_spec.model, "layers", None) or ()
    if not layers:
        yield f"{model_spec.name} has no layers that could be checked: documents might see each other; {fix}"
    for index, layer in enumerate(layers):
        inner = getattr(getattr(layer, "attention", None), "inner_attention", None)
        if not isinstance(inner, FlexAttention.Config | VarlenAttention.Config):
            kind = "no attention that is known" if inner is None else type(inner).__qualname__
            yield f"layer {index} of {model_spec.name} has {kind}: documents of a pack would see each other; {fix}"


def model_of(name: str, config: Any) -> ModelSpec:
    """Return what the cost model reads of torchtitan's `Decoder.Config`, dense with layers all alike, grouped-query
    attention and a gated block; a `ConfigError` for another kind of model."""
    fix = 'name the model for which packs are balanced: loader={"model": ...}'
    try:
        shapes = {
            (one.attention.n_heads, one.attention.n_kv_heads, one.attention.head_dim, one.feed_forward.w1.out_features)
            for one in config.layers
        }
        vocab_size, tied = config.vocab_size, config.enable_weight_tying
    except AttributeError as err:
        raise ConfigError(f"torchtitan's {name} is no dense decoder of alike layers ({err}); {fix}") from err
    if len(shapes) != 1:
        raise ConfigError(f"torchtitan's {name} has layers of heads, key heads, widths {shapes}; {fix}")
    num_heads, num_kv_heads, head_dim, ffn_hidden_size = shapes.pop()
    return alike_model(
        name=name,
        num_layers=len(config.layers),
        hidden_size=config.dim,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads or num_heads,
        head_dim=head_dim or config.dim // num_heads,
        ffn_hidden_size=ffn_hidden_size,
        vocab_size=vocab_size,
        tied_embeddings=tied,
    )
