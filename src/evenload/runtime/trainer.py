"""`Trainer` is one rank's training loop: `StepSource` makes the steps, `StepTrainer` trains them, and between them come
checkpoints and validation losses. The caller gets a `StepReport` a step on rank 0, to show and to write."""

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec

from evenload.config.planner import host_memory_of_run, layers_move, make_flex_planner, make_planner, require_optimizer
from evenload.config.tokenizer import require_tokenizer, run_tokenizer_text, tokenizer_warnings
from evenload.config.train_config import TrainConfig
from evenload.cost.coefficients import CostCoefficients
from evenload.data.batches import decode_state, encode_state
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import ConfigError, DataError, InfeasiblePlanError, InvalidPlanError
from evenload.feed.step_maker import PlannedStep
from evenload.planning.layouts.flex_planner import FlexPlanner, FlexRunPlanner, PlannerState, resumed_flex
from evenload.planning.layouts.measured_layouts import MeasuredAfter, MeasuredLayouts
from evenload.planning.planner import RunPlanner, StepPlanner
from evenload.planning.strategies.registry import require_trainable
from evenload.runtime.checkpoint.checkpoint import Progress, RunPosition, checkpoint_for_all, load_checkpoint
from evenload.runtime.checkpoint.directory import checkpoints_of
from evenload.runtime.checkpoint.hf_export import export_run
from evenload.runtime.checkpoint.writer import Saves
from evenload.runtime.comm.collectives import TorchPeers
from evenload.runtime.comm.mesh import Mesh, Meshes
from evenload.runtime.device import measured_peak_bytes
from evenload.runtime.evaluation import EvaluatedRun, Evaluation, EvaluationResult, Validator
from evenload.runtime.model.model_config import model_spec
from evenload.runtime.replay.context_attention import require_no_window
from evenload.runtime.stages.live_stages import Monitor
from evenload.runtime.stages.rank_state import RankState
from evenload.runtime.step_metrics import StepReport
from evenload.runtime.step_source import StepSource
from evenload.runtime.step_trainer import StepTrainer
from evenload.types.model import attention_kernels
from evenload.types.run import RunTotals


class Trainer:
    """Trains a run on one rank, with its virtual stages, optimizer shard and loader."""

    def __init__(self, config: TrainConfig, mesh: Mesh, meshes: Meshes | None = None) -> None:
        self.config = config = config.with_found_kinds()
        self.meshes = meshes or Meshes([mesh])
        layouts = self.meshes.layouts
        self.model = model_spec(config)
        require_optimizer(config, self.model, len(layouts))
        if config.parallel.cp_exchange == "ring":
            require_no_window(max(self.model.windows))
        twin_bytes = config.plan.twin_bytes
        if twin_bytes is None and mesh.device.type == "cuda":
            twin_bytes = host_memory_of_run(config.plan, mesh.ranks_per_machine).twin_bytes
        self.state = RankState(config.model, config.optimizer, config.train, self.model, self.meshes, twin_bytes)
        backend = next(iter(self.state.stages.values())).backend  # what `auto` took
        self.model = msgspec.structs.replace(self.model, attention_kernels=attention_kernels(backend.name))
        self.hf_config = self.state.held.hf_config
        tokenizer = require_tokenizer(config.data, config.model.pretrained, self.model.vocab_size)
        self.run_tokenizer_text = run_tokenizer_text(config.data, tokenizer, self.model.vocab_size)
        self.tokenizer_warnings = tokenizer_warnings(config.data, tokenizer, config.model.path)
        self._tokenizer = tokenizer
        self.loader = self.new_loader()
        self._checkpoints = checkpoints_of(config.train.output_dir)
        validator = None
        if config.validation is not None:
            validator = Validator(
                config.validation,
                config.data,
                tokenizer,
                self.model.vocab_size,
                self.meshes,
                strategy=config.plan.strategy,
                exchange=config.parallel.cp_exchange,
            )
        keep_best = config.train.keep_best
        self._evaluation = Evaluation(validator, keep_best=keep_best, checkpoints=self._checkpoints)
        self.steps_done = 0
        self.totals = RunTotals()
        self._loader_state = self.loader.state()
        self._planner_state = PlannerState()
        self._layouts_known: tuple[MeasuredAfter, ...] = ()
        self.coefficients: CostCoefficients | None = None
        self._saves = Saves(config.train, self.state, self._position)
        self.step_trainer = StepTrainer(config.train, self.model, self.state, self._saves)
        self.saved_strategy = ""
        """Strategy of the last steps of the resumed checkpoint; "" = no run was resumed."""
        self.resume_warning = ""
        self.stop_signal = 0
        """Signal because of which all ranks agreed to end after the last step; 0 = none."""

    @property
    def mesh(self) -> Mesh:
        return self.state.mesh

    def new_loader(self) -> GlobalBatchLoader:
        """Make a loader at the start of the run's data. All ranks read together."""
        peers = TorchPeers(self.mesh.planning)
        return GlobalBatchLoader(self.config.data, self._tokenizer, peers=peers, vocab_size=self.model.vocab_size)

    def resume(self) -> Path | None:
        """Load the latest checkpoint, `coefficients` included; return its path, or None. `ConfigError` where
        `train.resume` is off, or it is damaged. Collective."""
        path = checkpoint_for_all(self._checkpoints, self.mesh, may_resume=self.config.train.resume)
        if path is None:
            return None
        position = load_checkpoint(path, self.state)
        self.loader.load_state(decode_state(position.loader))
        self.steps_done, self.totals = position.progress.steps_done, position.progress.totals
        self._loader_state = self.loader.state()
        progress, self.coefficients = position.progress, position.coefficients
        flex = resumed_flex(progress.flex, self.meshes.layouts, layers_move=layers_move(self.config.plan))
        self._planner_state = PlannerState(delay=progress.planner, flex=flex)
        self._layouts_known, self.saved_strategy = progress.layouts_known, progress.strategy
        self.resume_warning = self._evaluation.resume(progress)
        self.step_trainer.non_finite.num_skipped = progress.skipped_steps
        self._saves.saved_steps = self.steps_done
        return path

    def train(
        self,
        coefficients: CostCoefficients,
        memory_cap_bytes: int,
        stop_after: int | None = None,
        stop_requested: Callable[[], int] = lambda: 0,
    ) -> Iterator[StepReport | None]:
        """Run the remaining steps; yield a report after each on rank 0, None elsewhere. Consume the iterator to
        the end: ranks prepare coming steps together. Collective.

        Args:
            coefficients: of the cost model; the same on every rank.
            memory_cap_bytes: of one process.
            stop_after: stop when so many steps are done in all, although the configured run is longer.
            stop_requested: number of a signal that this rank got, or 0; called once a step, and before every batch of
                validation data. When any rank got one, all end, and `stop_signal` is that signal.

        Raises:
            NonFiniteStepError: a step is not finite and `train.on_nonfinite` is "stop", or ten in a row were not.
            CheckpointError: a checkpoint in the background failed and `train.on_failed_checkpoint` is "stop".
            RankLostError: another rank died or is stuck.
            InfeasiblePlanError: a resumed run has no memory for the switch back into the layout of its checkpoint.
        """
        self.coefficients = coefficients
        planner, flex = self.planners(coefficients, memory_cap_bytes)
        monitor, measured_of = None, lambda step: MeasuredLayouts()
        if flex is not None:
            monitor = Monitor(flex, self.state.layout, self.config.data.prefetch_steps, self._layouts_known)
            measured_of = measured_of if monitor.track is None else monitor.track.for_step
        run_steps, strategy = self.config.train.steps, self.config.plan.strategy
        last_step = min((n for n in (run_steps, stop_after) if n is not None), default=None)
        for layout in self.meshes.layouts:
            require_trainable(strategy, layout, planner.options, self.config.data.most_tree_tokens)
        source = self._source(FlexRunPlanner(flex or RunPlanner(planner, strategy), measured_of), last_step)
        run = EvaluatedRun(
            state=self.state,
            planner_of=flex.planner_of if flex else lambda layout: planner,
            is_last=partial(self._is_last, source, last_step),
            stop_requested=stop_requested,
            settle_saves=self._saves.settle,
        )
        is_first, ended_s = True, time.perf_counter()
        while not self.stop_signal:
            wait_from_s = time.perf_counter()
            self.mesh.watch.record("the wait for its next documents and plan")
            prepared = source.next()
            if prepared is None:
                self.state.optimizer.gathers.finish()
                return
            data_wait_s = time.perf_counter() - wait_from_s
            step = prepared.planned.plan.step
            if is_first and flex is not None:
                flex.require_headroom(self.state.layout, prepared.planned.plan)
            is_first = False
            report, agreed, is_skipped = self.step_trainer.run(
                prepared,
                coefficients,
                learning_rate=self.config.optimizer.rate(step, run_steps),
                data_wait_s=data_wait_s,
                stop_signal=stop_requested(),
                goes_on=step + 1 != last_step and not self._evaluation.validates_after(step + 1),
            )
            before_s, ended_s = ended_s, time.perf_counter()
            self.stop_signal = agreed.stop_signal
            self.totals = self.totals.after(prepared.planned.plan, ended_s - before_s, is_skipped=is_skipped)
            if report is not None:
                report = self._with_decision(report, prepared.planned, monitor)
            self.steps_done += 1
            self._loader_state = self.step_trainer.non_finite.account(prepared.planned.loader_state)
            self._planner_state = prepared.planned.planner_state
            yield self._validated_and_saved(report, run, is_time_to_save=agreed.is_time_to_save)
        self.state.optimizer.gathers.finish()
        source.close()

    def _source(self, planner: FlexRunPlanner, last_step: int | None) -> StepSource:
        run_steps = self.config.train.steps
        return StepSource(
            self.loader,
            planner,
            self.meshes,
            self.config.parallel.cp_exchange,
            max_pack_tokens=self.config.max_pack_tokens,
            to_make=None if last_step is None else max(0, last_step - self.steps_done),
            of_run=None if run_steps is None else max(0, run_steps - self.steps_done),
            planner_state=self._planner_state,
        )

    def _validated_and_saved(
        self, report: StepReport | None, run: EvaluatedRun, *, is_time_to_save: bool
    ) -> StepReport | None:
        """Evaluate and save what is due after a step: validation losses, a checkpoint. Collective."""
        try:
            evaluated = EvaluationResult() if self.stop_signal else self._evaluation.after_step(self.steps_done, run)
        except (DataError, ConfigError, InfeasiblePlanError, InvalidPlanError):
            # From the validation data, on every rank: the trained steps are complete.
            self.save()
            raise
        self.stop_signal = self.stop_signal or evaluated.stop_signal
        is_time = is_time_to_save or evaluated.is_best
        saved, failed_save = self._saves.after_step(self.steps_done, is_time=is_time)
        return report and replace(report, saved=saved, failed_save=failed_save, validation=evaluated.validation)

    def _is_last(self, source: StepSource, last_step: int | None) -> bool:
        """Say whether no step of the run comes after those that are done; unknown, thus False, at `last_step`."""
        run_steps = self.config.train.steps
        if run_steps is not None and self.steps_done >= run_steps:
            return True
        return (last_step is None or self.steps_done < last_step) and not source.has_next()

    def _with_decision(self, report: StepReport, planned: PlannedStep, monitor: Monitor | None) -> StepReport:
        decision = None
        if monitor is not None:
            # A CPU's count has no temporary buffers, which predictions have.
            peak_bytes = measured_peak_bytes(self.mesh.device) and int(report.row["peak_memory_bytes"] or 0)
            decision = monitor.note(planned, report.measured, report.switch, peak_bytes)
            self._layouts_known = monitor.known()
        return replace(report, row=report.row | self.totals.metrics(), decision=decision)

    def planners(self, coefficients: CostCoefficients, memory_cap_bytes: int) -> tuple[StepPlanner, FlexPlanner | None]:
        """Make the planner of the layout in which the run starts, and that of a run whose layout may change."""
        mesh, config = self.meshes.start, self.config
        ranks = mesh.ranks_per_machine
        planner = make_planner(config, self.model, mesh.layout, coefficients, memory_cap_bytes, ranks)
        if self.state.live is None:
            return planner, None
        return planner, make_flex_planner(config, planner, self.meshes.layouts, self.state.live.moved)

    def save(self) -> Path:
        """Write a complete checkpoint of the steps done, or raise `CheckpointError`. Collective."""
        return self._saves.save(self.steps_done)

    def _position(self) -> RunPosition:
        progress = Progress(
            steps_done=self.steps_done,
            layout=self.mesh.layout.describe(),
            strategy=self.config.plan.strategy,
            skipped_steps=self.step_trainer.non_finite.num_skipped,
            totals=self.totals,
            planner=self._planner_state.delay,
            flex=self._planner_state.flex,
            layouts_known=self._layouts_known,
            best=self._evaluation.best,
            validation_digest=self._evaluation.digest,
        )
        return RunPosition(progress=progress, loader=encode_state(self._loader_state), coefficients=self.coefficients)

    def export(self, suffix: str = "") -> Path:
        """Write the model as a Hugging Face directory, or the trained adapter as a PEFT directory. Collective."""
        config, output = self.config, Path(self.config.train.output_dir)
        buffers, stages = self.state.buffers, self.state.stages.values()
        constants = {name: tensor for stage in stages for name, tensor in stage.model.constants().items()}
        return export_run(output, config.model, config.data, self.hf_config, buffers, constants, self.mesh, suffix)

    def export_average(self) -> Path | None:
        """Export the moving average of the weights (`train.ema_decay`) as `export` does; None where there is none."""
        if self.config.train.ema_decay is None:
            return None
        with self.state.optimizer.average_as_weights():
            return self.export("-average")
