"""Define the TOML file of `evenload train` (`TrainConfig`), strict about every key.

Needs no torch: `evenload plan` and `evenload lengths` read the same file.
"""

import copy
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec

from evenload.config.keys import apply_override, converted, plan_options, require_known, setting_paths
from evenload.config.sections import (
    LogConfig,
    LoraConfig,
    OptimizerConfig,
    RunConfig,
    ValidationConfig,
    uses_liger,
    validation_data,
    with_held_out,
)
from evenload.config.tokenizer import with_default_tokenizer, with_found_kinds
from evenload.data.config import DataConfig, require_least
from evenload.data.part_files import with_kinds
from evenload.errors import ConfigError, unreadable
from evenload.planning.problem import PlanOptions
from evenload.types.base import Frozen, PathText, write_out_home
from evenload.types.layout import ChannelChoice, ParallelLayout, even_layout, split_layout
from evenload.types.model import ModelSpec, attention_kernels

BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2}
"""By `model.dtype`."""
_NEEDED = (
    "a run needs model.path, data.sources (or data.mixture), data.max_document_tokens, data.batch_documents or "
    "data.batch_tokens, train.output_dir, and train.steps or data.epochs"
)


class ModelConfig(Frozen):
    """The model to train.

    Args:
        path: a Hugging Face directory, a `config.json` or a name that `evenload plan` knows, such as "qwen3-0.6b" (then
            `random_init` is needed), or a name on the Hugging Face Hub, such as "Qwen/Qwen3-0.6B" or
            "Qwen/Qwen3-0.6B@main": from its local cache, else downloaded.
        random_init: start from random weights instead of the directory's.
        dtype: precision of weights and activations; bfloat16 keeps fp32 master weights.
        router_aux_loss_coef: factor of the load-balancing loss of a model with experts; 0 = trained without. Default:
            that of config.json if it sets `output_router_logits`, else the run is refused until this is set.
        lora: train LoRA adapters and freeze the model's own weights; default: train all weights.
    """

    path: PathText
    random_init: bool = False
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    router_aux_loss_coef: float | None = None
    lora: LoraConfig | None = None

    def __post_init__(self) -> None:
        write_out_home(self)

    @property
    def pretrained(self) -> str | None:
        """Return the path of the weights that training starts from; None = random ones."""
        return None if self.random_init else self.path


class ParallelConfig(Frozen):
    """Sizes of the parallel dimensions; their product is the number of processes.

    Args:
        dp: replicas that train different documents of the same step (data parallel).
        pp: pipeline stages.
        cp: ranks that share the documents of a replica (context parallel); how, the strategy decides.
        cp_exchange: how keys and values of shared documents travel. "all_gather": once a layer, and all are kept of
            documents that are cut. "ring": every rank keeps its share, but documents that are cut travel again with
            every slice; refused for models with a sliding window.
        tp: ranks that hold parts of the same matrices (tensor parallel, with sequence parallelism); must divide the
            model's heads, key/value heads and feed-forward columns, and heads or groups of recurrent layers. Refused
            where no plan for the model's parts is known, as of OLMo 2 and GPT-2.
        virtual: stages on every pipeline rank; more make the pipeline's bubble smaller and its transfers more.
        channels: how pipeline ranks exchange hidden states and gradients. "directed": a process group for each
            direction between neighbouring stages, so that no transfer waits for another. "fifo": one queue for each
            pair of ranks, in the order of the plan, for devices on which transfers of different groups may block each
            other. "auto": "fifo" on GPUs without `stage_devices`; else "directed".
        stage_layers: layers of every virtual stage, `pp * virtual` of them, such as those that `evenload plan` chooses
            by cost; default: split evenly. May change when a run is resumed.
        stage_devices: processes of every stage where they differ, such as [1, 2, 1] for pp = 3: the two of the second
            stage hold the same layers and take its packs in turn. With dp = cp = tp = virtual = 1, directed channels
            and the strategies `balanced` and `flexpipe`; default: one process a stage and replica.
    """

    dp: int = 1
    pp: int = 1
    cp: int = 1
    cp_exchange: Literal["all_gather", "ring"] = "all_gather"
    tp: int = 1
    virtual: int = 1
    channels: ChannelChoice = "auto"
    stage_layers: tuple[int, ...] | None = None
    stage_devices: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        require_least("parallel", self, "at least 1", 1, "virtual")
        if self.stage_layers is None:
            return
        stages = self.pp * self.virtual
        if len(self.stage_layers) != stages or min(self.stage_layers, default=0) < 1:
            raise ConfigError(
                f"parallel.stage_layers is {list(self.stage_layers)}, must be {stages} numbers of at least 1, one for "
                "each of parallel.pp x parallel.virtual stages"
            )


class PlanConfig(Frozen):
    """How steps are planned.

    Args:
        strategy: a name of `evenload plan`; the same data is trained whatever it is.
        layouts: other layouts that the run may take between two steps, as `evenload plan --layout` reads them, such as
            ["pp=4", "pp=2,dp=2", "pp=3,layers=3+3+2"]; it starts in that of `[parallel]`, the largest. cp and tp cannot
            change; without `dp` as many replicas as fit, and processes left over are idle. Without any, `flexpipe`
            takes some depths of the same processes (`plan.options.flexpipe.most_layouts`, `most_groups`). `evenload
            bench` and `check` stay in that of `[parallel]`.
        memory_bytes: what one process may hold; default: its share of the machine's memory.
        host_memory_bytes: main memory of one machine, of which offloaded activations may take 85 %; default: what the
            machine, or its container, has.
        twin_bytes: how much memory a machine's processes may share so that `layouts` change fast: weights and optimizer
            state are read there and not sent. CPUs share what training holds anyway; default: all. GPUs copy through
            page-locked host memory that is taken once a machine for as long as the run lasts; default: at most half of
            what `host_memory_bytes` leaves beside offloading. What does not fit is left out; 0 = nothing is shared.
            Refused where the run takes one layout.
        options: limits and search space of the planners.
    """

    strategy: str = "auto"
    layouts: tuple[str, ...] = ()
    memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    twin_bytes: int | None = None
    options: PlanOptions = PlanOptions()

    def __post_init__(self) -> None:
        require_least("plan", self, "0 or more; leave it out to share all", 0, "twin_bytes")
        most = "at least 1; leave it out for what the machine has"
        require_least("plan", self, most, 1, "memory_bytes", "host_memory_bytes")


class TrainConfig(Frozen):
    """The whole file: one table per section."""

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    plan: PlanConfig = PlanConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: RunConfig
    log: LogConfig = LogConfig()
    validation: ValidationConfig | None = None

    def __post_init__(self) -> None:
        # No reader of the data trains what validates.
        msgspec.structs.force_setattr(self, "data", with_held_out(self.data, self.validation))
        if self.validation is not None:
            validation_data(self.data, self.validation)  # refuses what does not go together
            if self.validation.of_average and self.train.ema_decay is None:
                raise ConfigError(
                    "validation.of_average is true, but train.ema_decay is not set, so there is no average of weights; "
                    "set train.ema_decay, such as 0.999, or leave of_average out"
                )
        elif self.train.keep_best:
            raise ConfigError(
                f"train.keep_best is {self.train.keep_best}, but there is no [validation], so no checkpoint has a "
                "validation loss; give it validation.sources or validation.share, or leave keep_best out"
            )
        if self.train.deterministic:
            self._require_plans_of_data_alone()
        if self.train.steps is None and self.data.epochs is None:
            raise ConfigError("train.steps and data.epochs are both unset, so the run would never end; set one of them")
        self.optimizer.require_steps(self.train.steps)

    def _require_plans_of_data_alone(self) -> None:
        measured = {
            "plan.layouts": bool(self.plan.layouts),
            'plan.strategy = "flexpipe"': self.plan.strategy == "flexpipe",
            "train.recalibrate": self.train.recalibrate,
        }
        for one in self.plan.options.strategies:
            name = f"plan.options.{one.__struct_config__.tag}.time_budget_s"
            measured[name] = getattr(one, "time_budget_s", None) is not None
        if setting := next((setting for setting, is_set in measured.items() if is_set), None):
            raise ConfigError(
                f"train.deterministic is set, and with {setting} plans depend on measured seconds, which no run has "
                "twice; leave one of both out"
            )

    @property
    def max_pack_tokens(self) -> int:
        """Return the token limit of a pack: as configured, else the longest document allowed."""
        return self.plan.options.max_pack_tokens or self.data.max_document_tokens

    def with_found_kinds(self) -> "TrainConfig":
        """Return the configuration in which `record` of all data is known, as the data shows (`with_kinds`)."""
        data, validation = with_found_kinds(self.data, self.model.path), self.validation
        if validation is not None and validation.share is None:
            own = with_kinds(validation_data(self.data, validation))
            validation = msgspec.structs.replace(validation, record=own.record, mixture=own.mixture)
        return msgspec.structs.replace(self, data=data, validation=validation)

    def with_run_memory(self, model: ModelSpec) -> ModelSpec:
        """Return a model whose memory counts what the optimizer keeps, and what a GPU's kernels hold, or do not."""
        on_cuda = self.train.device == "cuda" and self.model.dtype == "bfloat16"
        in_kernels = on_cuda and self.train.attention != "reference"
        return msgspec.structs.replace(
            model,
            attention_workspace=in_kernels,
            attention_kernels=attention_kernels(self.train.attention),
            ordered_attention=in_kernels and self.train.deterministic,
            fused_cross_entropy=uses_liger(self.train, self.model.dtype),
            averaged_weights=self.train.ema_decay is not None,
            bfloat16_moments=self.optimizer.moments == "bfloat16",
            unit_gradients=self.optimizer.in_backward,
            offloaded_state=self.optimizer.offload_stages,
        )


def load_train_config(path: Path, overrides: Sequence[str] = ()) -> TrainConfig:
    """Read a TOML file and apply `section.key=value` overrides; an unset tokeniser becomes the model directory's.
    Raises `ConfigError`: no file, bad TOML, an unknown key or choice (with the nearest known one), or a bad value."""
    try:
        tree = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(f"configuration {path}", error) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"configuration {path} is no text in UTF-8 ({error.reason}); give a TOML file") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration {path} is not valid TOML: {error}") from error
    return read_train_config(tree, overrides)


def read_train_config(tree: Mapping[str, Any], overrides: Sequence[str] = ()) -> TrainConfig:
    """Read nested tables of a TOML file, which are not changed; otherwise as `load_train_config`."""
    tree = copy.deepcopy(dict(tree))
    every = tuple(setting_paths(TrainConfig))
    for override in overrides:
        apply_override(tree, override, every)
    require_known(tree, TrainConfig)
    plan = tree.get("plan")
    if isinstance(plan, dict) and isinstance(plan.get("options"), dict):
        plan["options"] = plan_options(plan["options"])
    config = converted(tree, TrainConfig, needed=_NEEDED)
    return msgspec.structs.replace(config, data=with_default_tokenizer(config.data, config.model.path))


def layout_of(parallel: ParallelConfig, num_layers: int) -> ParallelLayout:
    """Return the configured layout; layers are split evenly where `parallel.stage_layers` is not set. Raises
    `ConfigError`: more stages than layers, stages that do not hold all layers, or untested devices of stages."""
    p, layers = parallel, parallel.stage_layers
    sizes = {"dp": p.dp, "cp": p.cp, "pp": p.pp, "tp": p.tp}
    if layers is None:
        return even_layout(num_layers, **sizes, virtual=p.virtual, devices=p.stage_devices)
    if sum(layers) != num_layers:
        raise ConfigError(
            f"parallel.stage_layers {list(layers)} hold {sum(layers)} layers, the model has {num_layers}; give every "
            "layer to a stage, or leave stage_layers out for an even split"
        )
    return split_layout(layers, **sizes, devices=p.stage_devices)
