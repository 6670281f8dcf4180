"""Define the sections `[train]` (`RunConfig`), `[log]`, `[model.lora]`, `[validation]` and `[optimizer]` of the file,
each with the checks that need no other section, and the learning rate of every step. Needs no torch."""

import hashlib
import math
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Literal

import msgspec

from evenload.data.config import DataConfig, MixturePart, RecordSettings, require_least, require_value
from evenload.errors import ConfigError, MissingPackageError, did_you_mean
from evenload.types.base import Frozen, PathText, write_out_home
from evenload.types.cluster import DeviceKind
from evenload.types.model import ModelSpec


class RunConfig(Frozen):
    """The run itself.

    Args:
        output_dir: metrics, checkpoints, report and final weights go here.
        steps: optimizer steps in all; None = until `data.epochs` are done.
        seed: of random weights (data has its own).
        device: "cpu", or "cuda": one GPU for each process. Several GPUs have never run together yet.
        attention: backend of range attention: "reference", "cpu_flash", "varlen_cuda", "varlen_cuda_fa3",
            "varlen_cuda_fa4"; "auto" = the fastest for device and model.
        kernels: what computes norms, rotary embedding, gated activation and cross-entropy: "torch", or "liger" on a GPU
            (`pip install 'evenload[liger]'`), for those modules for which Liger computes the same; "auto" = Liger's
            where they are installed and the device is a GPU. The start of a run says which.
        threads_per_process: None = the machine's cores divided by the processes on it.
        cost_file: cost coefficients (`cost.json` of another run of this model and layout, else refused); None = measure
            this device at start, which takes seconds and is cached, so that predictions are in its seconds.
        calibration_max_s: seconds that measuring costs may take, about; where layers are too slow for that, fewer are
            timed, less often, and predicted step times carry no interval.
        checkpoint_every_steps: a checkpoint after every so many steps; 0 = by time, see `checkpoint_every_s`.
        checkpoint_every_s: a checkpoint at the end of the step in which so many seconds have passed since the last one;
            0 = none by time. Default: 600, or 0 where `checkpoint_every_steps` is set. The end of a run and a signal
            that stops it always save.
        stop_grace_s: after SIGTERM, SIGHUP or Ctrl-C the running step is finished and a checkpoint is saved; processes
            that then still run after so many seconds are killed. Under torchrun `--shutdown-timeout` decides.
        keep_checkpoints: newest complete checkpoints that stay in `output_dir`; 0 = all.
        keep_best: checkpoints with the smallest validation losses that stay, too; one is written after every validation
            whose loss is among them. `best.json` names the best; 0 = none.
        background_checkpoints: train on while a checkpoint is written; takes host memory for one more copy of weights
            (divided by dp) and optimizer state. False = wait until it is written.
        checkpoint_timeout_s: how long ranks wait for each other's part of a checkpoint.
        on_failed_checkpoint: "stop" the run when a checkpoint on the way cannot be written, or report it and
            "continue" until the next one. The last one of a run has to succeed.
        deterministic: a resumed run trains the same weights to the bit on a GPU too, as on a CPU: kernels that add in
            one order, for which attention's backward holds more memory, and plans that follow nothing measured; refused
            with `plan.layouts`, `flexpipe`, `recalibrate`, and a search that ends by the clock.
        resume: go on from the latest checkpoint in `output_dir` if there is one; false refuses a directory that
            holds one, so that two runs never mix.
        on_nonfinite: where the loss or the gradient norm of a step is NaN or infinite, its update is never applied:
            "stop" the run with an error that names step, pack and documents, or "skip" the step, whose documents count
            as dropped ("not finite") in the ledger. Ten such steps in a row stop the run in either case.
        report_every_s: least seconds between two versions of `report.html` and its files, and more where writing them
            takes above 2 % of the time; 0 = only at the end.
        recalibrate: measure costs again, whatever is cached or in the checkpoint that is resumed.
        export_hf: write the trained model as a Hugging Face directory at the end.
        ema_decay: keep a moving average of the weights, `average <- decay * average + (1 - decay) * weights` after
            every update; it is in checkpoints, and exported as `model-average/`. Such as 0.999; unset = none.
        overlap_reduction: reduce-scatter the gradients of a layer while the layers before it are computed; the same to
            the bit. False = all after the last backward, as in steps whose packs replicas share, and where a run
            measures that it does not pay.
        overlap_gather: begin the next step while updated weights are still gathered; the same to the bit. False = all
            before the step ends, as where a run measures that it does not pay.
        timeout_s: how long a rank waits for another before it gives up.
    """

    output_dir: PathText
    steps: int | None = None
    seed: int = 0
    device: DeviceKind = "cpu"
    attention: str = "auto"
    kernels: Literal["auto", "torch", "liger"] = "auto"
    threads_per_process: int | None = None
    cost_file: PathText | None = None
    calibration_max_s: float = 20.0
    checkpoint_every_steps: int = 0
    checkpoint_every_s: float | None = None
    stop_grace_s: float = 120.0
    keep_checkpoints: int = 3
    keep_best: int = 0
    background_checkpoints: bool = True
    checkpoint_timeout_s: float = 3600.0
    on_failed_checkpoint: Literal["stop", "continue"] = "stop"
    deterministic: bool = False
    resume: bool = True
    on_nonfinite: Literal["stop", "skip"] = "stop"
    report_every_s: float = 60.0
    recalibrate: bool = False
    export_hf: bool = True
    ema_decay: float | None = None
    overlap_reduction: bool = True
    overlap_gather: bool = True
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        write_out_home(self)
        require_least("train", self, "at least 1", 1, "steps")
        require_least("train", self, "0 or more", 0, "checkpoint_every_steps")
        require_least("train", self, "0 (keep all) or more", 0, "keep_checkpoints")
        require_least("train", self, "0 (none) or more", 0, "keep_best")
        require_least("train", self, "0 (never) or more", 0, "checkpoint_every_s", "report_every_s")
        is_decay = self.ema_decay is None or 0 < self.ema_decay < 1
        require_value("train", self, "ema_decay", is_decay, "above 0 and below 1, such as 0.999")
        if self.recalibrate and self.cost_file is not None:
            raise ConfigError(
                f"train.recalibrate is true, but train.cost_file = '{self.cost_file}' says which costs to use; set one"
            )
        for field in ("calibration_max_s", "timeout_s", "checkpoint_timeout_s", "stop_grace_s"):
            require_value("train", self, field, getattr(self, field) > 0, "above 0")

    @property
    def checkpoint_interval_s(self) -> float:
        """Return the most seconds of training between two checkpoints, up to a step; 0 = not by time."""
        if self.checkpoint_every_s is not None:
            return self.checkpoint_every_s
        return 0.0 if self.checkpoint_every_steps else 600.0


def liger_refusal(device: str, dtype: str) -> str:
    """Return why Liger's kernels cannot compute in this precision on this device and machine; "" = they can."""
    if device != "cuda":
        return f'they need train.device = "cuda", and it is "{device}"'
    if dtype == "float64":
        return 'they compute in float32, and model.dtype is "float64"'
    try:
        installed = version("liger-kernel")
    except PackageNotFoundError:
        return "liger-kernel is not installed: pip install 'evenload[liger]'"
    if not installed.startswith("0.8."):
        return f"liger-kernel {installed} is installed, and 0.8 is tested: pip install 'evenload[liger]'"
    return ""


def uses_liger(run: RunConfig, dtype: str) -> bool:
    """Tell whether a run in this precision computes with Liger's kernels."""
    return run.kernels == "liger" or (run.kernels == "auto" and not liger_refusal(run.device, dtype))


Tracker = Literal["wandb", "tensorboard"]


class LogConfig(Frozen):
    """Where a run reports, besides `metrics.jsonl`, which has every step.

    Args:
        to: also "wandb" (Weights & Biases) and "tensorboard" (event files in `output_dir`/tensorboard); a resumed run
            goes on in the same one. Needs `pip install 'evenload[wandb]'` or `'evenload[tensorboard]'`.
        project: of Weights & Biases.
        name: of the run there; default: the last part of `train.output_dir`.
        lines_every_s: a line about a step is shown at most once in so many seconds, besides the first two steps and
            the last; 0 = for every step, as in runs of up to 20 steps.
    """

    to: tuple[Tracker, ...] = ()
    project: str = "evenload"
    name: str | None = None
    lines_every_s: float = 10.0

    def __post_init__(self) -> None:
        require_value("log", self, "to", len(set(self.to)) == len(self.to), "without repetition")
        require_least("log", self, "0 (every step) or more", 0, "lines_every_s")


def require_trackers(config: LogConfig) -> None:
    """Raise `MissingPackageError` where the package of a tracker is not installed; imports none."""
    for name in config.to:
        if find_spec(name) is None:
            raise MissingPackageError(
                f"log.to names '{name}', whose package is not installed here; install it with: pip install "
                f"'evenload[{name}]', or leave it out of log.to"
            )


class LoraConfig(Frozen):
    """Train LoRA adapters instead of the model's own weights, which stay frozen.

    Args:
        rank: of the adapters.
        alpha: an adapter's output is multiplied by alpha / rank.
        target_modules: linears of every layer that get an adapter, by their last name; or all of them.
        dropout: must be 0, because a mask would differ between forward and backward packs.
        path: a PEFT directory whose adapter to go on from; None = a new one, which begins as no change at all.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: tuple[str, ...] | Literal["all-linear"] = "all-linear"
    dropout: float = 0.0
    path: PathText | None = None

    def __post_init__(self) -> None:
        write_out_home(self)
        require_least("model.lora", self, "at least 1", 1, "rank")
        require_value("model.lora", self, "alpha", self.alpha > 0, "above 0")
        named = 'at least one linear, or "all-linear"'
        require_value("model.lora", self, "target_modules", bool(self.target_modules), named)
        why = "0: a dropout mask would differ between forward and backward packs"
        require_value("model.lora", self, "dropout", self.dropout == 0, why)


def with_adapters(model: ModelSpec, lora: LoraConfig | None) -> ModelSpec:
    """Return a model that trains adapters alone; `ConfigError` for a target module that the layer does not have."""
    if lora is None:
        return model
    # Experts are no linears: all of a layer are one tensor.
    names = target_linears({one.name: None for kind in model.kinds for one in kind.products}, lora)
    kinds = []
    for kind in model.kinds:
        widths = sum(one.inputs + one.outputs for one in kind.products if one.name in names)
        kinds.append(msgspec.structs.replace(kind, adapter_parameters=lora.rank * widths))
    return msgspec.structs.replace(model, kinds=tuple(kinds))


def target_linears(known: Mapping[str, object], lora: LoraConfig) -> list[str]:
    """Return the linears of `known` that get adapters; `ConfigError` where `target_modules` names something else."""
    if lora.target_modules == "all-linear":
        return list(known)
    if name := next((one for one in lora.target_modules if one not in known), None):
        raise ConfigError(
            f"model.lora.target_modules has '{name}'; a layer of this model has the linears {', '.join(known)} "
            "(experts, embedding and head cannot have adapters)"
        )
    return [name for name in known if name in lora.target_modules]


_OWN = ("every_steps", "at_end", "of_average", "batches", "share")
_OF_SHARE = (*_OWN, "batch_documents", "batch_tokens")


class ValidationConfig(RecordSettings):
    """Losses of other data while the model trains, by forwards alone. The data are documents of their own (`sources`,
    `mixture`), or a share of those of `[data]`, which then are not trained. What is not set is as in `[data]`; all
    documents are read once, in the same order every time, and no token is left out but by `data.overlong`.

    Args:
        every_steps: after every so many steps; 0 = at the end alone.
        at_end: after the last step of the run, too.
        of_average: of the moving average of the weights (`train.ema_decay`) instead of the weights.
        batches: so many global batches of the data; unset = all of it.
        share: of the documents of `[data]`, such as 0.01, that are held out of training; chosen by a hash of source
            and place, whatever the order. One of `share`, `sources` and `mixture` is set.
        sources: files, directories, glob patterns or URLs.
        mixture: several data sets instead, each with a loss of its own; weights decide their order alone.
        batch_documents, batch_tokens: documents that are planned together; unset = as in `[data]`.
        format, record, include: as in `[data]`.
        text_column, messages_column, prompt_column, completion_column, tokens_column: likewise.
        labels_column, mask_column, ignore_columns, document_end_id, loss_on, group_by: likewise.
    """

    every_steps: int = 0
    at_end: bool = True
    of_average: bool = False
    batches: int | None = None
    share: float | None = None
    sources: tuple[str, ...] = ()
    mixture: tuple[MixturePart, ...] = ()
    batch_documents: int | None = None
    batch_tokens: int | None = None

    def __post_init__(self) -> None:
        require_least("validation", self, "0 (at the end alone) or more", 0, "every_steps")
        require_least("validation", self, "at least 1; leave it out for all data", 1, "batches")
        if not self.every_steps and not self.at_end:
            raise ConfigError(
                "validation.every_steps is 0 and validation.at_end false, so nothing is ever validated; set one of "
                "them, or leave [validation] out"
            )
        if bool(self.sources) + bool(self.mixture) + (self.share is not None) != 1:
            share = "unset" if self.share is None else self.share
            raise ConfigError(
                f"validation.share is {share}, validation.sources is {list(self.sources)} and validation.mixture has "
                f"{len(self.mixture)} parts; set exactly one of them: a share of [data], which is then not trained, or "
                "other documents"
            )
        if self.share is not None:
            require_value("validation", self, "share", 0 < self.share < 1, "above 0 and below 1, such as 0.01")
            for field in msgspec.structs.fields(type(self)):
                if field.name not in _OF_SHARE and getattr(self, field.name) != field.default:
                    raise ConfigError(
                        f"validation.share is {self.share} and validation.{field.name} is set, but documents of [data] "
                        "are read as it says; leave one of both out"
                    )
        if self.batch_documents is not None and self.batch_tokens is not None:
            raise ConfigError(
                f"validation.batch_documents is {self.batch_documents} and validation.batch_tokens is "
                f"{self.batch_tokens}; set one of them, or none"
            )

    def is_due(self, steps_done: int) -> bool:
        """Tell whether to validate after so many steps, whether or not they are the last."""
        return bool(self.every_steps) and steps_done % self.every_steps == 0


def validation_data(data: DataConfig, validation: ValidationConfig) -> DataConfig:
    """Return how the validation data is read: once, by the training processes. `ConfigError`: settings clash."""
    given = msgspec.structs.asdict(validation).items()
    own = {name: value for name, value in given if value is not None and name not in _OWN}
    if validation.share is None:
        own |= {"held_out_share": 0.0, "reads": "training"}
    else:
        del own["sources"], own["mixture"]
        own |= {"held_out_share": validation.share, "reads": "held_out"}
    if "batch_documents" in own or "batch_tokens" in own:
        own = {"batch_documents": None, "batch_tokens": None} | own
    try:
        return msgspec.structs.replace(data, **own, mixture_end="once", epochs=1, workers=0, prefetch_steps=0)
    except ConfigError as error:
        raise ConfigError(f"[validation]: {error}") from error


def with_held_out(data: DataConfig, validation: ValidationConfig | None) -> DataConfig:
    """Return the data of training, without what is held out for validation. `ConfigError`: settings clash."""
    if data.reads == "held_out":
        raise ConfigError('data.reads is "held_out", so the run would train on what is held out; leave it out')
    share = None if validation is None else validation.share
    if share is None or share == data.held_out_share:
        return data
    if data.held_out_share:
        raise ConfigError(
            f"validation.share is {share} and data.held_out_share is {data.held_out_share}; leave the latter out"
        )
    return msgspec.structs.replace(data, held_out_share=share)


def validation_digest(data: DataConfig, validation: ValidationConfig) -> str:
    """Hash all that decides which losses a model has; losses under different digests are not to be compared."""
    decides = (validation_data(data, validation), validation.batches, validation.of_average)
    return hashlib.sha256(msgspec.json.encode(decides)).hexdigest()


Decay = Literal["constant", "cosine", "linear", "wsd"]
_NAMES = ("adamw", "muon")
_EIGHT_BITS = "for a smaller state set optimizer.moments = 'bfloat16' (6 bytes a weight instead of 12), or more dp; "
_MOST_DECAY = 0.99
"""A bfloat16 has 8 significant bits: a moment that one step changes by less than 2^-8 of it would stay where it is."""
_NORM_COMES_LATE = "the norm of all gradients is known when the first weights are updated already"
_DECAY_SHARE = 0.1
"""Of the steps of a run in which WSD decays by default (MiniCPM, Hu et al. 2024)."""


class OptimizerConfig(Frozen):
    """The optimizer, and the learning rate with warm-up and decay.

    Args:
        name: "adamw", fused; or "muon" for the matrices of layers, its updates as large as AdamW's, and AdamW for all
            other weights.
        learning_rate: after warm-up.
        beta1, beta2, eps: as in `torch.optim.AdamW`.
        momentum: of "muon", as in `torch.optim.Muon`.
        weight_decay: of matrices; norms and biases have none.
        clip_norm: global gradient norm limit; 0 = no clipping.
        moments: precision of AdamW's moments. "float32" (float64 for a float64 model); "bfloat16": half of it, and fp32
            weights are kept as the model's bfloat16 ones and 16 bits more, so that the state takes 6 bytes a weight
            instead of 12. With `model.dtype = "bfloat16"` and `beta1` and `beta2` of at most 0.99.
        in_backward: update every layer as soon as its gradients are complete, and use their memory for those of the
            layer before it: 4 bytes a weight of the largest unit (embedding, a layer, or the head) instead of all. With
            one pack a step and replica (`plan.strategy = "balanced"`, `plan.options.micro_batches = 1`), `clip_norm`
            0 and layouts of `dp` alone. Weights and moments are the same to the bit.
        offload_stages: pipeline stages, from 0, whose ranks keep the optimizer's state in host memory, such as [0], the
            only stage of layouts without `pp`. The device then holds weights and gradients, and the state's bytes cross
            the link to host memory twice a step. With "adamw", without in_backward. Weights are the same to the bit.
        warmup_steps: linear warm-up from 0.
        decay: what follows warm-up. "constant"; "cosine" or "linear" down to `final_ratio` of the learning rate at
            `train.steps`; "wsd": constant, and down to `final_ratio` in the last steps alone, so that a checkpoint of
            the constant part can go on with more `train.steps`.
        final_ratio: of the learning rate, where the decay ends.
        decay_steps: of "wsd": the last so many steps of the run decay; unset = a tenth of them.
        decay_shape: of "wsd": how it decays. "linear", "cosine", "sqrt" (1 - sqrt of the part that is done), or
            "exponential".
    """

    name: str = "adamw"
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    momentum: float = 0.95
    weight_decay: float = 0.1
    clip_norm: float = 1.0
    moments: Literal["float32", "bfloat16"] = "float32"
    in_backward: bool = False
    offload_stages: tuple[int, ...] = ()
    warmup_steps: int = 0
    decay: Decay = "constant"
    final_ratio: float = 0.1
    decay_steps: int | None = None
    decay_shape: Literal["linear", "cosine", "sqrt", "exponential"] | None = None

    def __post_init__(self) -> None:
        if self.name not in _NAMES:
            why = _EIGHT_BITS if "8bit" in self.name.lower() else did_you_mean(self.name, _NAMES)
            raise ConfigError(f"optimizer.name is '{self.name}'; {why}choices: {', '.join(_NAMES)}")
        for field, is_right, what in (
            ("momentum", 0 <= self.momentum < 1, "from 0 to below 1"),
            ("learning_rate", self.learning_rate > 0, "above 0"),
            ("clip_norm", self.clip_norm >= 0, "0 or more"),
            ("clip_norm", not (self.in_backward and self.clip_norm), f"0 with in_backward: {_NORM_COMES_LATE}"),
            ("warmup_steps", self.warmup_steps >= 0, "0 or more"),
            ("final_ratio", 0 <= self.final_ratio <= 1, "from 0 to 1"),
            ("decay_steps", self.decay_steps is None or self.decay_steps >= 1, "at least 1"),
        ):
            require_value("optimizer", self, field, is_right, what)
        for field in ("beta1", "beta2") if self.moments == "bfloat16" else ():
            most = f'at most {_MOST_DECAY} with moments = "bfloat16", which is too coarse for slower averages'
            require_value("optimizer", self, field, getattr(self, field) <= _MOST_DECAY, most)
        for field in ("decay_steps", "decay_shape"):
            if getattr(self, field) is not None and self.decay != "wsd":
                raise ConfigError(
                    f"optimizer.{field} is {getattr(self, field)}, which optimizer.decay = '{self.decay}' does not "
                    f'read; set optimizer.decay = "wsd", or leave {field} out'
                )
        if self.decay_shape == "exponential" and not self.final_ratio:
            raise ConfigError(
                "optimizer.decay_shape is 'exponential' and optimizer.final_ratio 0, which it never reaches; set a "
                "final_ratio above 0, or another shape"
            )

    def _decaying_steps(self, total_steps: int) -> int:
        """Return in how many steps "wsd" decays."""
        return self.decay_steps or max(1, round(_DECAY_SHARE * total_steps))

    def require_steps(self, total_steps: int | None) -> None:
        """Raise `ConfigError` where the schedule does not fit into so many steps; None = it ends with its data."""
        if self.decay == "constant":
            return
        if total_steps is None:
            raise ConfigError(
                f"optimizer.decay is '{self.decay}', which ends at train.steps, but train.steps is not set"
            )
        if self.decay == "wsd" and self.warmup_steps + (decaying := self._decaying_steps(total_steps)) > total_steps:
            raise ConfigError(
                f"optimizer.warmup_steps {self.warmup_steps} and the {decaying} steps in which 'wsd' decays are more "
                f"than train.steps {total_steps}; lower one of them, or raise train.steps"
            )

    def rate(self, step: int, total_steps: int | None) -> float:
        """Return the learning rate of a step (from 0) in a run of `total_steps`; None = it ends with its data."""
        if step < self.warmup_steps:
            return self.learning_rate * (step + 1) / self.warmup_steps
        if self.decay == "constant":
            return self.learning_rate
        assert total_steps is not None, "`require_steps` refuses it"
        shape, num_decaying = self.decay, total_steps - self.warmup_steps
        if self.decay == "wsd":
            shape, num_decaying = self.decay_shape or "linear", self._decaying_steps(total_steps)
        done = min(1.0, max(0.0, (step - (total_steps - num_decaying)) / max(1, num_decaying)))
        if shape == "exponential":
            return self.learning_rate * self.final_ratio**done
        shares = {"cosine": 0.5 * (1 + math.cos(math.pi * done)), "linear": 1 - done, "sqrt": 1 - math.sqrt(done)}
        return self.learning_rate * (self.final_ratio + (1 - self.final_ratio) * shares[shape])
