"""`RunConfig`: the section `[train]` of the TOML file: how long a run goes on, where it runs, what it keeps.

Needs no torch.
"""

from typing import Literal

from evenload.errors import ConfigError
from evenload.types.base import Frozen, PathText, write_out_home
from evenload.types.cluster import DeviceKind

# What a killed run may lose by default; a save itself costs training a copy in memory.
_CHECKPOINT_EVERY_S = 600.0


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
        keep_best: so many checkpoints with the smallest validation losses stay beside the newest ones; one is written
            after every pass over the data of `[validation]` whose loss is among them. `best.json` beside
            them names the best; 0 = none.
        background_checkpoints: train on while a checkpoint is written; takes host memory for one more copy of weights
            (divided by dp) and optimizer state. False = wait until it is written.
        checkpoint_timeout_s: how long ranks wait for each other's part of a checkpoint.
        on_failed_checkpoint: "stop" the run when a checkpoint on the way cannot be written, or report it and
            "continue" until the next one. The last one of a run has to succeed.
        deterministic: a run that is resumed trains the same weights to the bit on a GPU too, as it does on a CPU in any
            case: kernels that add in one order (attention's backward holds more memory for it, which is in the
            predictions), and plans that follow nothing that is measured on the way: refused with `plan.layouts`,
            `flexpipe`, `recalibrate`, and a search that ends by the clock. What it costs on this GPU is told at start.
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
        ema_decay: keep a moving average of the weights, `average <- decay * average + (1 - decay) * weights` after
            every update, in the precision of the optimizer and divided over replicas as its state is; it is in
            checkpoints, and exported beside the model (`model-average/`). Such as 0.999; unset = none.
        overlap_reduction: sum the gradients of a layer over replicas as soon as the last pack has added to them, while
            the layers before it are computed. The sums are the same to the bit. False = all of them after the last
            backward, as where a run measures at its start that sums keep packs longer than they take alone, and in
            steps whose packs replicas share.
        overlap_gather: begin the next step while updated weights are still gathered: a forward waits for those of its
            own layers. What is trained is the same to the bit. False = all of them before the step ends, as where a run
            measures at its start that gathers keep packs longer than they take alone.
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

    output_dir: PathText
    steps: int | None = None
    seed: int = 0
    device: DeviceKind = "cpu"
    attention: str = "auto"
    threads_per_process: int | None = None
    cost_file: PathText | None = None
    checkpoint_every_steps: int = 0
    checkpoint_every_s: float | None = None
    stop_grace_s: float = 120.0
    keep_checkpoints: int = 3
    keep_best: int = 0
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
    ema_decay: float | None = None
    overlap_reduction: bool = True
    overlap_gather: bool = True
    timeout_s: float = 600.0
    on_lost_rank: Literal["stop", "shrink"] = "stop"
    replace_lost_ranks: int = 0
    survivor_memory: Literal["off", "shared"] = "off"

    def __post_init__(self) -> None:
        write_out_home(self)
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
        if self.ema_decay is not None and not 0 < self.ema_decay < 1:
            raise ConfigError(f"train.ema_decay is {self.ema_decay}, must be above 0 and below 1, such as 0.999")
        if self.keep_best < 0:
            raise ConfigError(f"train.keep_best is {self.keep_best}, must be 0 (none) or more")
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
