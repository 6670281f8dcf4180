"""`Trainer`: one rank's training loop. Prepared step in, gradients, optimizer, metrics out.

Everything about *what* to train comes in the plan; the loop only follows it. The caller (the command
line, or a user's script) gets a `StepReport` per step on rank 0 and decides what to show and write.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist

from evenload.attention.range_attention import select_backend
from evenload.cost.coefficients import CostCoefficients
from evenload.data.loader import GlobalBatchLoader
from evenload.data.state import decode_state, encode_state
from evenload.errors import CheckpointError
from evenload.plan.delay import DelayState
from evenload.plan.merge_default import decide_dp_merge
from evenload.plan.planner import StepPlanner
from evenload.plan.sharding_cost import sharding_cost
from evenload.runtime.checkpoint import (
    Progress,
    RunPosition,
    checkpoint_path,
    checkpoint_to_resume,
    checkpoints_of,
    latest_checkpoint,
    load_checkpoint,
)
from evenload.runtime.checkpoint_writer import CheckpointWriter, SavedCheckpoint
from evenload.runtime.config import TrainConfig
from evenload.runtime.context_ring import require_ring
from evenload.runtime.data_parallel import global_norm_and_loss, reduce_gradients
from evenload.runtime.device import forget_peak_bytes, measured_peak_bytes, seconds_now
from evenload.runtime.executor import Executor
from evenload.runtime.export_files import copy_tokenizer
from evenload.runtime.hf_export import export_adapter, export_hf
from evenload.runtime.hf_model import load_config
from evenload.runtime.lora_config import adapter_parameters_per_layer
from evenload.runtime.mesh import Mesh
from evenload.runtime.non_finite import NonFiniteSteps, is_finite
from evenload.runtime.optimizer import ShardedAdamW
from evenload.runtime.parameter_units import flatten_units, frozen_bytes
from evenload.runtime.rank_model import build_rank_models
from evenload.runtime.recipes import attention_soft_cap, router_aux_loss_coef
from evenload.runtime.run_layout import BYTES_PER_ELEMENT
from evenload.runtime.run_tokenizer import require_tokenizer, tokenizer_fact
from evenload.runtime.stage import PipelineStage
from evenload.runtime.step_metrics import no_label_warning, step_row
from evenload.runtime.step_source import PreparedStep, StepSource
from evenload.runtime.torch_peers import TorchPeers
from evenload.runtime.trace import gather_timeline
from evenload.types.model import ModelSpec, model_from_hf_config
from evenload.types.plan import StepPlan
from evenload.types.timeline import Timeline


@dataclass(frozen=True, eq=False, kw_only=True)
class StepReport:
    """What happened in a step; made on rank 0.

    Args:
        row: the fixed keys of metrics.jsonl.
        measured: all ranks' timeline.
        ledger_lines: documents and tokens so far.
        saved: the checkpoint that was completed meanwhile.
        failed_save: why one was not, where `train.on_failed_checkpoint` lets training go on.
        warning: what else should be seen, such as a batch without labels.
    """

    row: dict[str, int | float | str | None]
    plan: StepPlan
    measured: Timeline
    ledger_lines: tuple[str, ...]
    saved: SavedCheckpoint | None = None
    failed_save: str = ""
    warning: str = ""


def model_spec(config: TrainConfig) -> ModelSpec:
    """The configured model as the cost model sees it."""
    hf = load_config(config.model.path)
    path = Path(config.model.path)
    name = path.parent.name if path.name == "config.json" else path.stem if path.suffix == ".json" else path.name
    spec = model_from_hf_config(hf.to_dict(), name, BYTES_PER_ELEMENT[config.model.dtype])
    if config.model.lora is None:
        return spec
    adapters = adapter_parameters_per_layer(spec, config.model.lora)
    return msgspec.structs.replace(spec, adapter_parameters_per_layer=adapters)


class Trainer:
    """State of one rank: its virtual stages, optimizer shard and loader.

    Raises:
        ConfigError, UnsupportedModelError: see their makers.
    """

    def __init__(self, config: TrainConfig, mesh: Mesh) -> None:
        self.config = config
        self.mesh = mesh
        self.hf_config = load_config(config.model.path)
        self.model = model_spec(config)
        tokenizer = require_tokenizer(
            config.data,
            model_path=config.model.path,
            random_init=config.model.random_init,
            vocab_size=self.model.vocab_size,
        )
        self.tokenizer_fact = tokenizer_fact(config.data, tokenizer, self.model.vocab_size)
        weights = None if config.model.random_init else config.model.path
        models = build_rank_models(
            self.hf_config,
            layout=mesh.layout,
            pp_rank=mesh.pp_rank,
            tp_rank=mesh.tp_rank,
            dtype=getattr(torch, config.model.dtype),
            device=mesh.device,
            weights=weights,
            seed=config.train.seed,
            lora=config.model.lora,
            router_aux_loss_coef=router_aux_loss_coef(self.hf_config, config.model.router_aux_loss_coef),
        )
        self._frozen_bytes = frozen_bytes(tuple(models.values()))
        self._buffers = flatten_units(tuple(models.values()), mesh.data_size)
        backend = select_backend(
            config.train.attention,
            mesh.device.type,
            attention_soft_cap(self.hf_config),
            dtype=getattr(torch, config.model.dtype),
            head_dim=self.model.head_dim,
        )
        self.stages = {stage: PipelineStage(model, backend, mesh.tensor) for stage, model in models.items()}
        self._optimizer = ShardedAdamW(self._buffers, mesh, config.optimizer)
        if config.parallel.cp_exchange == "ring":
            require_ring(backend, max(self.model.windows))
        self._loader = GlobalBatchLoader(
            config.data, tokenizer, peers=TorchPeers(mesh.planning), vocab_size=self.model.vocab_size
        )
        self.steps_done = 0
        self._loader_state = self._loader.state()
        self._planner_state = DelayState()
        self.coefficients: CostCoefficients | None = None
        self._writer = CheckpointWriter(
            self._checkpoints, self._buffers, self._optimizer, mesh, keep=config.train.keep_checkpoints
        )
        self._saved_steps = -1
        self._saved_at_s = time.monotonic()
        self.saved_strategy = ""
        """That planned the last steps of the checkpoint that was resumed; "" = none was."""
        self.stop_signal = 0
        """The signal because of which all ranks agreed to end after the last step; 0 = none."""
        self._save_is_due = False
        self._non_finite = NonFiniteSteps(config.train.on_nonfinite, mesh)

    def resume(self) -> Path | None:
        """Load the latest checkpoint of the output directory, if there is one. Collective.

        Afterwards `coefficients` are those of the saved run.

        Raises:
            ConfigError: there is one, but `train.resume` is off.
        """
        found = checkpoint_to_resume(self._checkpoints, may_resume=self.config.train.resume)
        if found is not None:
            position = load_checkpoint(found, self._buffers, self._optimizer, self.mesh)
            self._loader.load_state(decode_state(position.loader))
            self.steps_done = self._saved_steps = position.progress.steps_done
            self._loader_state = self._loader.state()
            self._planner_state = position.progress.planner
            self.coefficients = position.coefficients
            self.saved_strategy = position.progress.strategy
            self._non_finite.num_skipped = position.progress.skipped_steps
        return found

    def train(
        self,
        coefficients: CostCoefficients,
        memory_cap_bytes: int,
        stop_after: int | None = None,
        asked_to_stop: Callable[[], int] = lambda: 0,
    ) -> Iterator[StepReport | None]:
        """Run the remaining steps; yields after every step, a report on rank 0 and None elsewhere. Collective.

        Args:
            coefficients: of the cost model; the same on every rank.
            memory_cap_bytes: of one process.
            stop_after: stop when so many steps are done in all, although the configured run is longer.
                Consume the iterator to its end: ranks prepare steps ahead, together.
            asked_to_stop: number of a signal after which this rank shall stop, or 0. Asked once a step; when any rank
                was asked, all end after that step, and `stop_signal` says which signal it was.

        Raises:
            NonFiniteStepError: a step is not finite and `train.on_nonfinite` is "stop", or ten in a row were not.
            CheckpointError: a checkpoint in the background failed and `train.on_failed_checkpoint` is "stop".
            RankLostError: another rank died or is stuck.
        """
        self.coefficients = coefficients
        options, _ = decide_dp_merge(
            msgspec.structs.replace(self.config.plan.options, max_pack_tokens=self.config.max_pack_tokens),
            self.config.plan.strategy,
            self.mesh.layout,
            coefficients,
        )
        planner = StepPlanner(self.model, coefficients, self.mesh.layout, memory_cap_bytes, options)
        self._executor = Executor(
            self.stages,
            self.mesh,
            exchange=self.config.parallel.cp_exchange,
            sharding_cost=sharding_cost(planner.costs, dp_merge=options.dp_merge),
        )
        last_step = min((n for n in (self.config.train.steps, stop_after) if n is not None), default=None)
        source = StepSource(
            self._loader,
            planner,
            self.config.plan.strategy,
            self.mesh,
            self._executor,
            num_steps=None if last_step is None else max(0, last_step - self.steps_done),
            max_pack_tokens=self.config.max_pack_tokens,
            planner_state=self._planner_state,
        )
        self._saved_at_s = time.monotonic()
        while not self.stop_signal:
            wait_from_s = time.perf_counter()
            self.mesh.watch.note("the wait for its next documents and plan")
            prepared = source.next()
            if prepared is None:
                return
            data_wait_s = time.perf_counter() - wait_from_s
            report = self._step(prepared, coefficients, data_wait_s, asked_to_stop())
            self.steps_done += 1
            self._loader_state = self._non_finite.account(prepared.planned.loader_state)
            self._planner_state = prepared.planned.planner_state
            saved, failed_save = self._save_on_the_way()
            if report is not None:
                report = replace(report, saved=saved, failed_save=failed_save)
            yield report
        source.close()

    def save(self) -> Path:
        """Have a complete checkpoint of the steps done. Collective.

        Raises:
            CheckpointError: it could not be written, whatever `train.on_failed_checkpoint` says.
        """
        self._end_save()
        if self._saved_steps != self.steps_done:
            self._start_save(time.perf_counter())
            self._writer.wait()
        return checkpoint_path(self._checkpoints, self.steps_done)

    def _save_on_the_way(self) -> tuple[SavedCheckpoint | None, str]:
        """After a step: start a checkpoint where one is due; (what was completed, what failed) since the last step.

        Ranks may learn at different steps that a save has ended, but start the next one at the same step.
        """
        settings, from_s = self.config.train, time.perf_counter()
        every = settings.checkpoint_every_steps
        if not (self._save_is_due or (every and self.steps_done % every == 0)):
            return self._end_save(only_if_done=True)
        outcome = self._end_save()
        self._start_save(from_s)
        return outcome if settings.background_checkpoints else self._end_save()

    def _end_save(self, *, only_if_done: bool = False) -> tuple[SavedCheckpoint | None, str]:
        try:
            return (self._writer.finished() if only_if_done else self._writer.wait()), ""
        except CheckpointError as error:
            self._saved_steps = -1
            if self.config.train.on_failed_checkpoint == "stop":
                raise
            return None, str(error)

    def _start_save(self, from_s: float) -> None:
        progress = Progress(
            steps_done=self.steps_done,
            layout=self.mesh.layout.describe(),
            strategy=self.config.plan.strategy,
            skipped_steps=self._non_finite.num_skipped,
            planner=self._planner_state,
        )
        position = RunPosition(
            progress=progress, loader=encode_state(self._loader_state), coefficients=self.coefficients
        )
        self._writer.start(position, from_s)
        self._saved_steps, self._saved_at_s = self.steps_done, time.monotonic()

    def source_size(self) -> tuple[int, int]:
        """Files of the data set, and their bytes as far as they are known."""
        files = [file for part in self._loader.parts for file in part.files]
        return len(files), sum(file.size_bytes or 0 for file in files)

    def export(self) -> Path:
        """Write the model as a Hugging Face directory, or the trained adapter as a PEFT directory. Collective."""
        output, model = Path(self.config.train.output_dir), self.config.model
        if model.lora is not None:
            export_adapter(output / "adapter", self._buffers, model.lora, model.path, self.mesh)
            return output / "adapter"
        export_hf(output / "model", self.hf_config, self._buffers, self.mesh)
        if self.mesh.rank == 0:
            copy_tokenizer(output / "model", self.config.data, model.path)
        return output / "model"

    @property
    def _checkpoints(self) -> Path:
        return checkpoints_of(self.config.train.output_dir)

    def _is_time_to_save(self) -> bool:
        """Rank 0 looks at its clock; the others do as it says."""
        interval_s = self.config.train.checkpoint_interval_s
        return bool(interval_s) and self.mesh.rank == 0 and time.monotonic() - self._saved_at_s >= interval_s

    def _before_giving_up(self) -> Path | None:
        """The newest checkpoint, once the one under way is complete."""
        with contextlib.suppress(CheckpointError):  # what is told is why the run ends
            self._end_save()
        return latest_checkpoint(self._checkpoints)

    def _step(
        self, prepared: PreparedStep, coefficients: CostCoefficients, data_wait_s: float, stop_signal: int
    ) -> StepReport | None:
        planned, mesh = prepared.planned, self.mesh
        plan = planned.plan
        learning_rate = self.config.optimizer.rate(plan.step, self.config.train.steps or plan.step + 1)
        watch, replicas = mesh.watch, f"the ranks that hold stage {mesh.pp_rank}"
        watch.step = plan.step
        with watch.waiting("the barrier at the start"):
            dist.barrier(group=mesh.control)
        zero_s = seconds_now(mesh.device)
        forget_peak_bytes(mesh.device)
        self._optimizer.zero_gradients()
        run = self._executor.run(plan, prepared.packs)
        with watch.waiting("the sum of gradients", replicas):
            shards = reduce_gradients(self._buffers, mesh)
        with watch.waiting("the gradient norm"):
            grad_norm, loss = global_norm_and_loss(self._buffers, shards, run.loss_sum, mesh)
        warning = ""
        if is_finite(loss, grad_norm):
            self._non_finite.note_finite()
            with watch.waiting("the updated weights", replicas):
                self._optimizer.step(shards, grad_norm, learning_rate)
        else:
            warning = self._non_finite.leave_out(planned, run, loss, grad_norm, self._before_giving_up)
        if not plan.num_label_tokens:
            warning = no_label_warning(plan)
        step_time_s = seconds_now(mesh.device) - zero_s

        static = self._optimizer.static_bytes() + self._frozen_bytes
        # On a CPU the store's own count, without temporary buffers.
        peak_bytes = measured_peak_bytes(mesh.device) or static + run.peak_bytes
        # Whether to stop and to save travels with what all ranks tell each other anyway, so they decide alike.
        told = (step_time_s, float(peak_bytes), data_wait_s, float(stop_signal), float(self._is_time_to_save()))
        peaks = torch.tensor(told, dtype=torch.float64)
        with watch.waiting("the loss and the timeline"):
            dist.all_reduce(peaks, op=dist.ReduceOp.MAX, group=mesh.control)
            measured = gather_timeline(
                run.trace, zero_s=zero_s, step_time_s=float(peaks[0]), static_bytes=static, mesh=mesh
            )
        self.stop_signal, self._save_is_due = int(peaks[3]), bool(peaks[4])
        if measured is None:
            return None
        row = step_row(
            plan,
            measured,
            self.model,
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=learning_rate,
            peak_flops_per_s=coefficients.peak_flops_per_s,
            plan_time_s=planned.plan_time_s,
            data_wait_s=float(peaks[2]),
            peak_memory_bytes=int(peaks[1]),
        )
        lines = self._non_finite.ledger_lines(planned)
        return StepReport(row=row, plan=plan, measured=measured, ledger_lines=lines, warning=warning)
