"""`PackedTrainer`, `PackedSFTTrainer`: transformers' and TRL's trainers, trained from a `PackedLoader`.

    trainer = PackedTrainer(model, args, train_loader=loader, eval_loader=evaluation)

`PackedTrainerMixin` makes such a class of any other Trainer: `class Mine(PackedTrainerMixin, TheirTrainer)`.
The loader has distributed the data, so Accelerate does not; a checkpoint holds the loader's state. Options that would
do nothing, draw random numbers, or depend on what else is in a row are refused. Before the first step two documents are
run, to see whether the model keeps them apart.
"""

import dataclasses
import functools
import itertools
import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import Trainer, TrainerCallback
from transformers.trainer_utils import EvalLoopOutput

from evenload.errors import CheckpointError, ConfigError, MissingPackageError, UnsupportedModelError
from evenload.integrations.engine_loop import balance_for_trained, own_logits, require_apart, require_place
from evenload.integrations.packed_loader import PackedLoader
from evenload.integrations.planner import model_spec_of
from evenload.runtime.model.model_config import rope_settings

LOADER_STATE = "evenload_loader.json"
"""File in a checkpoint's directory."""
_COUNT = "num_items_in_batch"
_OTHERWISE: Mapping[str, str] = {
    **dict.fromkeys(
        ("packing", "packing_strategy", "eval_packing", "padding_free"), "the loader packs by its strategy"
    ),
    "pad_to_multiple_of": "the loader has pack_multiple",
    **dict.fromkeys(("max_length", "truncation_mode"), "the loader has max_document_tokens and overlong"),
    "shuffle_dataset": "the loader has seed and shuffle_window",
    "train_sampling_strategy": "the loader draws and balances documents",
    "auto_find_batch_size": "lower the loader's max_tokens",
    "dataset_text_field": "the loader has text_column",
    **dict.fromkeys(("completion_only_loss", "assistant_only_loss"), "the loader has record and loss_on"),
    "chat_template_path": "the loader has chat_template",
    "eos_token": "the loader has eos_token; for generation set the tokeniser's",
    "label_smoothing_factor": "not tested with packs",
    "neftune_noise_alpha": "its noise is random, and weaker the longer the row is",
}
"""Options that would do nothing, or something else than for a row of one document, and what to do or why."""


class PackedTrainerMixin:
    """Trains from a loader; put it before `Trainer` or `SFTTrainer` among the bases.

    Args:
        train_loader: with `format="hf"`. It makes `args.gradient_accumulation_steps` micro-batches a step where it was
            made without `micro_batches`; else the Trainer accumulates as many as it makes.
        eval_loader: with `evaluation=True`; makes `evaluate()` the mean loss over its label tokens.
        arguments, settings: those of the Trainer, but for data sets, collator and batch sizes. A `ConfigError` for
            what would train something else.
    """

    def __init__(
        self, *arguments: Any, train_loader: PackedLoader, eval_loader: PackedLoader | None = None, **settings: Any
    ) -> None:
        self._train_loader, self._eval_loader, self._is_checked = train_loader, eval_loader, False
        args: Any = settings.get("args") or (arguments[1] if len(arguments) > 1 else None)
        _refuse_settings(args, train_loader, eval_loader, settings)
        self._num_epochs = None if args.max_steps > 0 else args.num_train_epochs
        if train_loader.micro_batches_are_given:
            args.gradient_accumulation_steps = train_loader.options.micro_batches
        else:
            train_loader.set_micro_batches(args.gradient_accumulation_steps)
        if hasattr(args, "dataset_kwargs"):
            # TRL would tokenise the placeholder.
            args.dataset_kwargs = (args.dataset_kwargs or {}) | {"skip_prepare_dataset": True}
        args.ignore_data_skip = True
        settings["train_dataset"] = _placeholder()
        if eval_loader is not None:
            settings["eval_dataset"] = _placeholder()
        super().__init__(*arguments, **settings)
        trainer: Any = self
        _refuse_trainer(trainer, train_loader)
        for loader in (train_loader, eval_loader):
            if loader is None:
                continue
            _refuse_model(trainer.model, loader)
            balance_for_trained(loader, trainer.model, lambda: model_spec_of(getattr(trainer.model, "config", None)))
        trainer.callback_handler.callbacks.insert(0, _Follow(train_loader, self._num_epochs))

    def get_train_dataloader(self) -> Any:
        """Return the loader's micro-batches, epoch after epoch."""
        return _TrainBatches(self._train_loader, self._num_epochs)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Return the evaluation loader's batches; a `ConfigError` where there is none, or another data set is given."""
        if self._eval_loader is None or eval_dataset not in (None, self.eval_dataset):  # type: ignore[missing-attribute]
            fix = "give PackedTrainer eval_loader=PackedLoader(..., evaluation=True)"
            raise ConfigError(f"evaluate() has no data; {fix}")
        return self._eval_loader

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Refuse `predict()`."""
        raise ConfigError("predict(): a PackedTrainer keeps no predictions; evaluate(), or use a plain Trainer")

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> tuple[list, Any]:
        """Return the micro-batches of one step, and the label tokens of the global batch."""
        samples = [dict(batch) for batch in itertools.islice(epoch_iterator, num_batches)]
        trainer: Any = self
        if not samples:
            trainer.control.should_epoch_stop = True
            return samples, None
        if self._num_epochs is not None and self._num_epochs % 1 == 0:
            # Their number of steps may be an estimate, their end is not.
            loader, state = self._train_loader, trainer.state
            is_last = loader.epoch + 1 == self._num_epochs and loader.is_at_epoch_end
            state.max_steps = state.global_step + 1 if is_last else max(state.max_steps, state.global_step + 2)
        counts = [sample.pop(_COUNT) for sample in samples]
        if len({int(count) for count in counts}) > 1 or len(samples) != num_batches:
            raise ConfigError(
                f"the Trainer requested {num_batches} micro-batches and got {len(samples)}, inside a step; resume from "
                "a checkpoint that was saved after one"
            )
        return samples, counts[0].to(device)

    def training_step(self, model: Any, inputs: dict[str, Any], *rest: Any, **settings: Any) -> Any:
        """Run the Trainer's step, and before the first one check the model on two documents."""
        inputs = self._checked(model, inputs)
        return super().training_step(model, inputs, *rest, **settings)  # type: ignore[missing-attribute]

    def _checked(self, model: Any, inputs: dict[str, Any]) -> dict[str, Any]:
        inputs = self._prepare_inputs(inputs)  # type: ignore[missing-attribute]
        if not self._is_checked:
            _require_apart(self, model)
        self._is_checked = True
        return inputs

    def _inner_training_loop(
        self, batch_size: Any = None, args: Any = None, resume_from_checkpoint: Any = None, *rest: Any, **settings: Any
    ) -> Any:
        if resume_from_checkpoint is not None:
            file = Path(resume_from_checkpoint) / LOADER_STATE
            try:
                state = json.loads(file.read_text())
            except (OSError, ValueError) as err:
                fix = "resume from another one, or train from its weights without resume_from_checkpoint"
                raise CheckpointError(f"checkpoint has no readable loader state '{file}': {err}; {fix}") from err
            self._train_loader.load_state_dict(state)
        if self._num_epochs is not None:
            steps = len(self._train_loader) / args.gradient_accumulation_steps
            args.max_steps = math.ceil(self._num_epochs * steps)
        return super()._inner_training_loop(  # type: ignore[missing-attribute]
            batch_size, args, resume_from_checkpoint, *rest, **settings
        )

    def evaluation_loop(
        self, dataloader: Any, description: str, *_: Any, metric_key_prefix: str = "eval", **__: Any
    ) -> EvalLoopOutput:
        """Return the mean loss over the label tokens of everything the loader has."""
        trainer: Any = self
        model = trainer._wrap_model(trainer.model, training=False)
        if model is trainer.model and not trainer.is_in_train:
            model = trainer.accelerator.prepare_model(model, evaluation_mode=True)
        was_training = model.training
        model.eval()
        total = torch.zeros((), dtype=torch.float64, device=trainer.args.device)
        num_documents = num_tokens = 0
        for step in dataloader.steps():
            num_documents += len(step.plan.documents)
            num_tokens += step.num_label_tokens
            for batch in step:
                inputs = self._checked(model, {key: value for key, value in batch.items() if key != _COUNT})
                with torch.no_grad(), trainer.compute_loss_context_manager():
                    # The sum over the batch's tokens, which compute_loss multiplies by the ranks, as gradients need.
                    loss = trainer.compute_loss(model, inputs, num_items_in_batch=1)
                    total += loss.double() / trainer.accelerator.num_processes
                on_step = trainer.callback_handler.on_prediction_step
                trainer.control = on_step(trainer.args, trainer.state, trainer.control)
        model.train(was_training)
        loss_sum = trainer.accelerator.reduce(total, "sum").item()
        metrics = {"loss": loss_sum / max(1, num_tokens), "label_tokens": num_tokens}
        named = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(None, None, named, num_documents)  # type: ignore[bad-argument-type]


class PackedTrainer(PackedTrainerMixin, Trainer):
    """transformers' `Trainer`, trained from loaders."""


@functools.cache
def packed_sft_trainer() -> type:
    """Return `PackedSFTTrainer`; a `MissingPackageError` where TRL is not installed, whose import takes seconds."""
    try:
        from trl import SFTTrainer
    except ImportError as error:
        fix = f"which cannot be imported ({error}); install it with: pip install 'trl>=1.16,<2'"
        raise MissingPackageError(f"evenload.PackedSFTTrainer needs TRL, {fix}") from error

    class PackedSFTTrainer(PackedTrainerMixin, SFTTrainer):
        """TRL's `SFTTrainer`, trained from loaders."""

    return PackedSFTTrainer


class _TrainBatches:
    """Gives the Trainer an epoch each time. Without `set_epoch`, as the Trainer counts from 0 after a resume."""

    def __init__(self, loader: PackedLoader, num_epochs: float | None) -> None:
        self._loader, self._num_epochs = loader, num_epochs

    def __iter__(self) -> Iterator[dict[str, Any]]:
        batches = iter(self._loader)
        if (first := next(batches, None)) is None and not self._loader.has_ended:
            # Resumed at the very end of an epoch; the Trainer takes an empty epoch for the end of the data.
            batches = iter(self._loader)
            if self._num_epochs is not None and self._loader.epoch >= self._num_epochs:
                return
        yield from batches if first is None else itertools.chain((first,), batches)


class _Follow(TrainerCallback):
    def __init__(self, loader: PackedLoader, num_epochs: float | None) -> None:
        self._loader, self._num_epochs = loader, num_epochs

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count epochs by the share of all steps, as the Trainer does not know where they end."""
        if self._num_epochs is not None:
            state.epoch = self._num_epochs * state.global_step / state.max_steps

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Write the loader's state into `checkpoint-<step>`, which the Trainer has just written."""
        if not args.should_save:
            return
        file = Path(args.output_dir) / f"checkpoint-{state.global_step}" / LOADER_STATE
        file.with_suffix(".part").write_text(json.dumps(self._loader.state_dict()))
        file.with_suffix(".part").replace(file)


def _refuse_settings(
    args: Any, train_loader: PackedLoader, eval_loader: PackedLoader | None, settings: dict[str, Any]
) -> None:
    if args is None:
        raise ConfigError("PackedTrainer needs args=TrainingArguments(...), with max_steps or num_train_epochs")
    for loader, name in ((train_loader, "train_loader"), (eval_loader, "eval_loader")):
        if loader is not None and loader.options.format != "hf":
            raise ConfigError(f'{name} has format "{loader.options.format}", the Trainer needs "hf"')
    if train_loader.options.evaluation or (eval_loader is not None and not eval_loader.options.evaluation):
        raise ConfigError("train_loader must not, and eval_loader must be made with evaluation=True")
    for name in ("train_dataset", "eval_dataset", "data_collator", "compute_metrics", "formatting_func"):
        if settings.get(name) is not None:
            raise ConfigError(f"{name} has no meaning with train_loader and eval_loader; leave it out")
    steps, micro_batches = args.gradient_accumulation_steps, train_loader.options.micro_batches
    # DeepSpeed's configuration has the number already.
    if train_loader.micro_batches_are_given and steps != micro_batches and (steps > 1 or args.deepspeed):
        made = f"the loader makes {micro_batches} micro-batches a step"
        raise ConfigError(f"gradient_accumulation_steps is {steps}, {made}; make it with micro_batches={steps}")
    if args.max_steps <= 0 and (epochs := train_loader.config.epochs or math.inf) < args.num_train_epochs:
        raise ConfigError(f"num_train_epochs is {args.num_train_epochs}, the loader ends after {epochs}; leave one out")
    for option in dataclasses.fields(args):
        value, why = getattr(args, option.name), _OTHERWISE.get(option.name)
        # TRL's default of max_length is 1024.
        is_met = option.name == "max_length" and value and value >= train_loader.config.max_document_tokens
        if why and value not in (option.default, None) and not is_met:
            raise ConfigError(f"{option.name} is {value}: {why}; leave it out")


def _refuse_trainer(trainer: Any, loader: PackedLoader) -> None:
    args, accelerator = trainer.args, trainer.accelerator
    ranks = accelerator.num_processes
    if args.n_gpu > 1:
        raise ConfigError(f"one process has {args.n_gpu} GPUs (DataParallel); start one process a GPU with torchrun")
    fix = "make it after TrainingArguments, or give rank and world_size; model-parallel ranks do not work"
    require_place(loader, accelerator.process_index, ranks, "the Trainer", fix)
    for size in ("get_tp_size", "get_cp_size", "get_sp_size"):
        if hasattr(trainer, size) and getattr(trainer, size)() > 1:
            raise ConfigError(f"{size[4:6]} = {getattr(trainer, size)()} is not tested with packs; leave it at 1")
    if not trainer.model_accepts_loss_kwargs:
        name = type(trainer.model).__name__
        raise ConfigError(f"{name} takes no num_items_in_batch, so its loss would be a mean of means; use another")
    if ranks > 1 and not args.average_tokens_across_devices:
        raise ConfigError(f"average_tokens_across_devices is off: gradients would be {ranks} times too small; set it")


def _refuse_model(model: Any, loader: PackedLoader) -> None:
    """Refuse a model that draws random numbers, or whose result for a document depends on the rest of its row."""
    for path, module in model.named_modules():
        is_dropout = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        for key, value in vars(module).items():
            if type(value) in (int, float) and value > 0 and (is_dropout or re.search("drop|jitter|noise", key)):
                where = f"{path or 'the model'} ({type(module).__name__})"
                raise UnsupportedModelError(f"{key} of {where} is {value}: losses would be random; set it to 0")
    if not hasattr(config := getattr(model, "config", None), "get_text_config"):
        return
    config = config.get_text_config()
    longest = loader.options.max_tokens if loader.options.fixed_shapes else loader.config.max_document_tokens
    for rope in rope_settings(config):
        if not re.search("dynamic|longrope", kind := str(rope.get("rope_type"))):
            continue
        if longest > (known := rope.get("original_max_position_embeddings") or config.max_position_embeddings):
            why = f"turns a whole pack by its longest document beyond {known} tokens"
            fix = f"documents may have {longest}: make the loader with max_document_tokens = {known}"
            raise UnsupportedModelError(f"rope_type '{kind}' {why}; {fix}")
    if getattr(config, "attn_temperature_tuning", None) and loader.options.max_tokens >= config.floor_scale:
        raise UnsupportedModelError(
            f"attn_temperature_tuning scales attention by places in the pack, from floor_scale = {config.floor_scale} "
            f"on; make the loader with max_tokens below it (it is {loader.options.max_tokens})"
        )
    if getattr(config, "output_router_logits", None) and (factor := getattr(config, "router_aux_loss_coef", 1.0)):
        raise UnsupportedModelError(
            f"output_router_logits adds {factor} times a load-balancing loss of packs, not of documents; set "
            "router_aux_loss_coef = 0 in SFTConfig, or output_router_logits to false in the model's configuration"
        )


def _require_apart(trainer: Any, model: Any) -> None:
    def logits(batch: dict[str, Any]) -> torch.Tensor:
        with trainer.compute_loss_context_manager():
            return own_logits(model, batch)

    is_fp8 = trainer.accelerator.mixed_precision == "fp8"
    require_apart(trainer.model, trainer._train_loader.options, trainer.args.device, logits, is_rough=is_fp8)


def _placeholder() -> Any:
    """Return a data set that is never read: the Trainer requires one, and TRL of this kind."""
    from datasets import Dataset

    return Dataset.from_list([{"input_ids": [0, 0], "labels": [-100, -100]}])
