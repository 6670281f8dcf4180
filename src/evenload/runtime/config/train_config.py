"""`TrainConfig`: the TOML file of `evenload train`, strict about every key.

Needs no torch: `evenload plan` and `evenload lengths` read the same file.
"""

import tomllib
from pathlib import Path
from typing import Literal

import msgspec

from evenload.data.config import DataConfig
from evenload.errors import ConfigError
from evenload.plan.problem.options import PlanOptions
from evenload.runtime.config.config_keys import apply_override, converted, plan_options, require_known
from evenload.runtime.config.lora_config import LoraConfig
from evenload.runtime.config.optimizer_config import OptimizerConfig
from evenload.runtime.config.run_tokenizer import with_default_tokenizer
from evenload.types.base import Frozen
from evenload.types.cluster import DeviceKind
from evenload.types.layout import ParallelLayout, even_layout, split_layout
from evenload.types.model import ModelSpec
from evenload.types.transfers import ChannelChoice

BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2}
"""Of `model.dtype`."""

# What a killed run may lose by default; a save itself costs training a copy in memory.
_CHECKPOINT_EVERY_S = 600.0


class ModelConfig(Frozen):
    """The model to train.

    Args:
        path: a Hugging Face directory, or a `config.json` (then `random_init` is needed).
        random_init: start from random weights instead of the directory's.
        dtype: precision of weights and activations; bfloat16 keeps fp32 master weights.
        router_aux_loss_coef: factor of the load-balancing loss of a model with experts; 0 = trained without. Default:
            that of config.json if it sets `output_router_logits`, else the run is refused until this is set.
        lora: train LoRA adapters and freeze the model's own weights; default: train all weights.
    """

    path: str
    random_init: bool = False
    dtype: Literal["float32", "bfloat16", "float64"] = "float32"
    router_aux_loss_coef: float | None = None
    lora: LoraConfig | None = None


class ParallelConfig(Frozen):
    """Sizes of the parallel dimensions; their product is the number of processes.

    Args:
        dp: replicas that train different documents of the same step (data parallel).
        pp: pipeline stages.
        cp: ranks that share the documents of a replica (context parallel); how, the strategy decides.
        cp_exchange: how keys and values of shared documents travel. "all_gather": once a layer, and every rank keeps
            all of documents that are cut. "ring": round the ranks, and every rank keeps its share only, but documents
            that are cut travel again with every slice; refused for models with a sliding window.
        tp: ranks that hold parts of the same matrices (tensor parallel, with sequence parallelism); must divide the
            model's heads, key/value heads and feed-forward columns. Refused for models with experts, OLMo 2 and GPT-2.
        virtual: stages on every pipeline rank; more make the pipeline's bubble smaller and its transfers more.
        channels: how pipeline ranks exchange hidden states and gradients. "directed": every pair of neighbouring stages
            has a process group for each direction, so that no transfer waits for another. "fifo": one group and one
            queue for each pair of ranks, everything in one order that follows the plan; for devices on which transfers
            of different groups block each other. "auto": "fifo" on GPUs, which do not promise that they never do, but
            with `stage_devices`; else "directed".
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
        if self.virtual < 1:
            raise ConfigError(f"parallel.virtual is {self.virtual}, must be at least 1")
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
        feedback: the measured seconds of trained steps correct the predicted ones of coming steps, so that a replica
            with a slow rank gets less work (`balanced`, `slimpack` and `auto`; `docs/training.md`). It never changes
            what a step trains. Not saved with checkpoints: a resumed run measures anew. `evenload bench` leaves it out.
        layouts: other layouts that the run may take between two steps, as `evenload plan --layout` reads them, such as
            ["pp=4", "pp=2,dp=2", "pp=3,layers=3+3+2"]; it starts in that of `[parallel]`, whose processes are all that
            there are. cp and tp cannot change; without `dp` as many replicas as fit, and processes left over are idle.
            Process groups of all of them are made at start. Without any, `flexpipe` takes some depths of the same
            processes (`plan.options.flexpipe.most_layouts`, `most_groups`). `evenload bench` and `check` stay in that
            of `[parallel]`.
        memory_bytes: what one process may hold; default: its share of the machine's memory.
        host_memory_bytes: main memory of one machine, of which offloaded activations may take 69 %; default: what the
            machine, or its container, has.
        twin_bytes: of a machine's memory, how much its processes may share so that `layouts` change fast: weights and
            optimizer state that lie there are read by a process that lacks them, and not sent. They are what training
            holds anyway, so this adds nothing. What does not fit is left out, in the order of the model; 0 = nothing is
            shared. Default: all on CPUs. GPUs send. Refused where the run takes one layout.
        options: limits and search space of the planners.
    """

    strategy: str = "slimpack"
    feedback: bool = False
    layouts: tuple[str, ...] = ()
    memory_bytes: int | None = None
    host_memory_bytes: int | None = None
    twin_bytes: int | None = None
    options: PlanOptions = PlanOptions()

    def __post_init__(self) -> None:
        if self.feedback and self.layouts:
            raise ConfigError(
                "plan.feedback and plan.layouts are both set, but the measured speed of ranks is of one layout; leave "
                "one of them out"
            )
        if self.twin_bytes is not None and self.twin_bytes < 0:
            raise ConfigError(f"plan.twin_bytes is {self.twin_bytes}, must be 0 or more; leave it out to share all")
        for field in ("memory_bytes", "host_memory_bytes"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise ConfigError(f"plan.{field} is {value}, must be at least 1; leave it out for what the machine has")


class RunConfig(Frozen):
    """The run itself.

    Args:
        output_dir: metrics, checkpoints, report and final weights go here.
        steps: optimizer steps in all; None = until `data.epochs` are done.
        seed: of random weights (data has its own).
        device: "cpu", or "cuda": one GPU for each process. The GPU path has not been run on hardware yet.
        attention: backend of range attention: "reference", "cpu_flash", "varlen_cuda", "varlen_cuda_fa3",
            "varlen_cuda_fa4"; "auto" = the fastest for device and model.
        threads_per_process: None = the machine's cores divided by the processes on it.
        cost_file: cost coefficients (`cost.json` of another run of this model and layout, else refused); None = measure
            this device at start, which takes seconds and is cached, so that predictions are in its seconds.
        checkpoint_every_steps: a checkpoint after every so many steps; 0 = by time, see `checkpoint_every_s`.
        checkpoint_every_s: a checkpoint at the end of the step in which so many seconds have passed since the last one
            (or since the start); 0 = none by time. Default: 600, or 0 where `checkpoint_every_steps` is set. The end of
            a run and a signal that stops it always save.
        stop_grace_s: after SIGTERM, SIGHUP or Ctrl-C the running step is finished and a checkpoint is saved; processes
            that have not ended after so many seconds are killed. Under torchrun its `--shutdown-timeout` says so.
        keep_checkpoints: newest complete checkpoints that stay in `output_dir`, older ones are deleted after each save;
            0 = all.
        background_checkpoints: train on while a checkpoint is written; takes host memory for one more copy of weights
            (divided by dp) and optimizer state. False = wait until it is written.
        checkpoint_timeout_s: how long ranks wait for each other's part of a checkpoint.
        on_failed_checkpoint: "stop" the run when a checkpoint on the way cannot be written, or report it and
            "continue" until the next one. The last one of a run has to succeed.
        deterministic: a run that is resumed trains the same weights to the bit on a GPU too, as it does on a CPU in any
            case: kernels that add in one order (attention's backward holds more memory for it, which is in the
            predictions), and plans that follow nothing that is measured on the way: refused with `plan.feedback`,
            `plan.layouts`, `flexpipe`, `recalibrate`, and a search that ends by the clock. What it costs on this GPU is
            told at start.
        fused_norms: root-mean-square norms as one kernel, equal but for rounding; default: on GPUs.
        fused_elementwise: rotary embedding and gated activation as one kernel each, which torch compiles at the first
            pack (seconds; needs triton on a GPU), equal but for rounding; default: on GPUs.
        resume: go on from the latest checkpoint in `output_dir` if there is one; false refuses a directory that
            holds one, so that two runs never mix.
        on_nonfinite: what to do where the loss or the gradient norm of a step is NaN or infinite. Its update is never
            applied. "stop" the run with an error that names step, pack and documents, or "skip" the step: weights and
            optimizer stay as they were, and its documents count as dropped ("not finite") in the ledger. Ten such
            steps in a row stop the run in either case.
        report_every_s: at least so many seconds lie between two versions of `report.html` and the files beside it that
            are written while the run goes on, and more where writing them takes above 2 % of the time; 0 = only at
            the end.
        recalibrate: measure costs again, whatever is cached or lies in the checkpoint that is resumed.
        export_hf: write the trained model as a Hugging Face directory at the end.
        overlap_reduction: sum the gradients of a layer over replicas as soon as the last pack has added to them, while
            the layers before it are computed. The sums are the same to the bit. False = all of them after the last
            backward, as where a run measures at its start that sums keep packs longer than they take alone, in steps
            whose packs replicas share, and with `plan.feedback`.
        overlap_gather: begin the next step while updated weights are still gathered: a forward waits for those of its
            own layers. What is trained is the same to the bit. False = all of them before the step ends, as where a run
            measures at its start that gathers keep packs longer than they take alone, and with `plan.feedback`.
        overlap_context: keys and values of documents that ranks share travel in parts of some key heads, and attention
            of one part is computed while the next ones are under way, forward and backward; in how many, a plan says
            for every pack, by price. What is trained is the same. False = in one part, as where a run measures at its
            start that it does not pay; `parallel.cp_exchange = "ring"` hides transfers in its own way.
        overlap_tensor: compute a pack in two halves where the cost model expects that to be shorter: while one's
            tensor-parallel transfers run the other is computed. Weight gradients are then summed in another order.
            False = never, as where a run measures at its start that transfers keep packs longer than they take alone.
        timeout_s: how long a rank waits for another before it gives up.
        on_lost_rank: what to do where a process of the run, or under torchrun a machine, is lost. "stop" the run with
            an error, or "shrink": the others go on from where `survivor_memory` says in a smaller layout: that of
            `plan.layouts` with most ranks, else one with as many `cp` and `tp` ranks. Under our launcher in the same
            processes, not on GPUs; under torchrun in those that its agents start again (`--nnodes MIN:MAX
            --max-restarts`).
        replace_lost_ranks: with "shrink" under our launcher: so many processes in all are started in the place of
            killed ones. The others take each in between two steps, or at once where it is there in time, and the run is
            as large as before; 0 = none.
        survivor_memory: with "shrink", from where the others go on. "off": from the last checkpoint; the steps since
            then are trained again. "shared", under our launcher: from the last finished step, which every rank keeps in
            shared memory of the machine (`/dev/shm`), twice its shard of weights and optimizer state: 24 bytes x
            parameters / (stages x replicas), in float64 twice that. Counted in memory limits. Where the machine or the
            launcher ends, the checkpoint is the way back in any case.
    """

    output_dir: str
    steps: int | None = None
    seed: int = 0
    device: DeviceKind = "cpu"
    attention: str = "auto"
    threads_per_process: int | None = None
    cost_file: str | None = None
    checkpoint_every_steps: int = 0
    checkpoint_every_s: float | None = None
    stop_grace_s: float = 120.0
    keep_checkpoints: int = 3
    background_checkpoints: bool = True
    checkpoint_timeout_s: float = 3600.0
    on_failed_checkpoint: Literal["stop", "continue"] = "stop"
    deterministic: bool = False
    fused_norms: bool | None = None
    fused_elementwise: bool | None = None
    resume: bool = True
    on_nonfinite: Literal["stop", "skip"] = "stop"
    report_every_s: float = 60.0
    recalibrate: bool = False
    export_hf: bool = True
    overlap_reduction: bool = True
    overlap_gather: bool = True
    overlap_context: bool = True
    overlap_tensor: bool = True
    timeout_s: float = 600.0
    on_lost_rank: Literal["stop", "shrink"] = "stop"
    replace_lost_ranks: int = 0
    survivor_memory: Literal["off", "shared"] = "off"

    def __post_init__(self) -> None:
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"train.steps is {self.steps}, must be at least 1")
        if self.checkpoint_every_steps < 0:
            raise ConfigError(f"train.checkpoint_every_steps is {self.checkpoint_every_steps}, must be 0 or more")
        if self.replace_lost_ranks < 0:
            raise ConfigError(f"train.replace_lost_ranks is {self.replace_lost_ranks}, must be 0 (none) or more")
        if self.replace_lost_ranks and self.on_lost_rank != "shrink":
            raise ConfigError(
                f"train.replace_lost_ranks is {self.replace_lost_ranks}, but train.on_lost_rank is "
                f"'{self.on_lost_rank}', so a lost process ends the run; set on_lost_rank to "
                "'shrink', or leave replace_lost_ranks out"
            )
        if self.survivor_memory == "shared" and self.on_lost_rank != "shrink":
            raise ConfigError(
                f"train.survivor_memory is 'shared' and train.on_lost_rank '{self.on_lost_rank}': where a lost rank "
                "ends the run nobody goes on; set on_lost_rank = 'shrink', or leave survivor_memory out"
            )
        if self.keep_checkpoints < 0:
            raise ConfigError(f"train.keep_checkpoints is {self.keep_checkpoints}, must be 0 (keep all) or more")
        for field in ("checkpoint_every_s", "report_every_s"):
            if (getattr(self, field) or 0) < 0:
                raise ConfigError(f"train.{field} is {getattr(self, field)}, must be 0 (never) or more")
        if self.recalibrate and self.cost_file is not None:
            raise ConfigError(
                f"train.recalibrate is true, but train.cost_file = '{self.cost_file}' says which costs to use; set one"
            )
        for field in ("timeout_s", "checkpoint_timeout_s", "stop_grace_s"):
            if not getattr(self, field) > 0:
                raise ConfigError(f"train.{field} is {getattr(self, field)}, must be above 0")

    @property
    def fuses_norms(self) -> bool:
        """Root-mean-square norms run as one kernel: as set, else on GPUs."""
        return self.device == "cuda" if self.fused_norms is None else self.fused_norms

    @property
    def fuses_elementwise(self) -> bool:
        """Rotary embedding and gated activation run as one kernel each: as set, else on GPUs."""
        return self.device == "cuda" if self.fused_elementwise is None else self.fused_elementwise

    @property
    def checkpoint_interval_s(self) -> float:
        """Most seconds of training between two checkpoints, up to a step; 0 = not by time."""
        if self.checkpoint_every_s is not None:
            return self.checkpoint_every_s
        return 0.0 if self.checkpoint_every_steps else _CHECKPOINT_EVERY_S


class TrainConfig(Frozen):
    """The whole file: one table per section."""

    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = ParallelConfig()
    plan: PlanConfig = PlanConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: RunConfig

    @property
    def sums_beside_packs(self) -> bool:
        """Gradients may be summed while packs are computed. Not with feedback: what sums take from computing would
        count as slowness of the rank, and once more beside it."""
        return self.train.overlap_reduction and not self.plan.feedback

    @property
    def parts_beside_attention(self) -> bool:
        """Keys and values of shared documents may travel in parts while attention is computed."""
        return self.train.overlap_context and self.parallel.cp_exchange == "all_gather"

    @property
    def gathers_beside_packs(self) -> bool:
        """Updated weights may be gathered while the next step's first packs are computed; not with feedback, as
        there."""
        return self.train.overlap_gather and not self.plan.feedback

    def __post_init__(self) -> None:
        if self.plan.twin_bytes and self.train.device != "cpu":
            raise ConfigError(
                f"plan.twin_bytes is {self.plan.twin_bytes} and train.device '{self.train.device}': GPUs of a machine "
                "send what moves between layouts over their own links; leave plan.twin_bytes out"
            )
        if self.train.deterministic:
            self._require_plans_of_data_alone()
        if self.train.steps is None and self.data.epochs is None:
            raise ConfigError("train.steps and data.epochs are both unset, so the run would never end; set one of them")
        if self.train.steps is None and self.optimizer.decay != "constant":
            raise ConfigError(
                f"optimizer.decay is '{self.optimizer.decay}', which ends at train.steps, but train.steps is not set"
            )

    def _require_plans_of_data_alone(self) -> None:
        by_clock = [
            f"plan.options.{one.__struct_config__.tag}.time_budget_s"
            for one in self.plan.options.strategies
            if getattr(one, "time_budget_s", None) is not None
        ]
        for setting, is_set in (
            ("plan.feedback", self.plan.feedback),
            ("plan.layouts", bool(self.plan.layouts)),
            ('plan.strategy = "flexpipe"', self.plan.strategy == "flexpipe"),
            ("train.recalibrate", self.train.recalibrate),
            *((name, True) for name in by_clock),
        ):
            if is_set:
                raise ConfigError(
                    f"train.deterministic is set, and with {setting} plans depend on measured seconds, which no run "
                    "has twice; leave one of both out"
                )

    @property
    def max_pack_tokens(self) -> int:
        """Token limit of a pack: as configured, else the longest document allowed."""
        return self.plan.options.max_pack_tokens or self.data.max_document_tokens

    def with_attention_memory(self, model: ModelSpec) -> ModelSpec:
        """A model whose memory counts what attention holds in a GPU's kernels, if it runs in them; where its shape
        keeps `auto` from them, plans leave memory unused."""
        in_kernels = self.train.device == "cuda" and self.train.attention != "reference"
        in_kernels = in_kernels and self.model.dtype == "bfloat16"
        ordered = in_kernels and self.train.deterministic
        return msgspec.structs.replace(model, attention_workspace=in_kernels, ordered_attention=ordered)


def load_train_config(path: Path, overrides: list[str]) -> TrainConfig:
    """Read a TOML file and apply `section.key=value` overrides; an unset tokeniser becomes the model directory's.

    Raises:
        ConfigError: no file, bad TOML, an unknown key or choice (with the nearest known one), or a bad value.
    """
    try:
        tree = tomllib.loads(path.read_text())
    except OSError as error:
        raise ConfigError(f"configuration {path} cannot be read: {error.strerror}") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"configuration {path} is not valid TOML: {error}") from error
    for override in overrides:
        apply_override(tree, override)
    require_known(tree, TrainConfig)
    plan = tree.get("plan")
    if isinstance(plan, dict) and isinstance(plan.get("options"), dict):
        plan["options"] = plan_options(plan["options"])
    config = converted(tree, TrainConfig)
    return msgspec.structs.replace(config, data=with_default_tokenizer(config.data, config.model.path))


def layout_of(config: TrainConfig, num_layers: int) -> ParallelLayout:
    """The configured layout; layers are split evenly where `parallel.stage_layers` is not set.

    Raises:
        ConfigError: more stages than layers, stages that do not hold all layers, or devices of stages that are not
            tested with the other sizes.
    """
    p = config.parallel
    if p.stage_layers is None:
        return even_layout(num_layers, dp=p.dp, cp=p.cp, pp=p.pp, tp=p.tp, virtual=p.virtual, devices=p.stage_devices)
    if sum(p.stage_layers) != num_layers:
        raise ConfigError(
            f"parallel.stage_layers {list(p.stage_layers)} hold {sum(p.stage_layers)} layers, the model has "
            f"{num_layers}; give every layer to a stage, or leave stage_layers out for an even split"
        )
    return split_layout(p.stage_layers, dp=p.dp, cp=p.cp, pp=p.pp, tp=p.tp, devices=p.stage_devices)
