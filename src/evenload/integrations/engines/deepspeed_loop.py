"""`DeepSpeedLoop`: a DeepSpeed engine (ZeRO-1, 2 or 3), trained from a `PackedLoader`.

    engine, *_ = deepspeed.initialize(model=model, config=config)
    loop = DeepSpeedLoop(engine, loader)

Exact gradients: every micro-batch's loss is divided by the label tokens of the global batch, and multiplied by the
number that DeepSpeed divides gradients by, because it takes a mean: the number of ranks. Where groups of them share
sequences (`ulysses`), it is the number of groups under ZeRO-1 and 2, that of ranks under ZeRO-3. DeepSpeed's own
accumulation divides by `gradient_accumulation_steps`, which must be 1: the plan says how many micro-batches a step has.

| stage | gradients are reduced | micro-batches of ranks |
|---|---|---|
| 1 | once a step | any number |
| 2 | after every micro-batch; once a step with `reduce_every_pack=False` | equal; any number |
| 3 | after every micro-batch; once a step with `reduce_every_pack=False` | equal: parameters are gathered in each |

Reducing once keeps whole gradients on every rank up to the end of the step (what stage 1 keeps anyhow), through
`engine.coalesce_grad_reduction()`. That reduces the parameters that have a gradient, so each needs one on all ranks or
on none: a rank without documents runs a pack without a loss. `set_gradient_accumulation_boundary` would not allow
different numbers of micro-batches under stage 2: the engine reduces at each of them.
"""

import importlib.metadata
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed as dist

from evenload.errors import CheckpointError, ConfigError
from evenload.integrations.batch_formats import format_pack, move_batch
from evenload.integrations.engines.engine_loop import EngineLoop, sum_over_ranks
from evenload.integrations.engines.pack_loss import PackLoss
from evenload.integrations.engines.told_by_rank_zero import told_by_rank_zero
from evenload.integrations.engines.ulysses import require_documents_apart, sequence_share, share_loss
from evenload.integrations.packed_loader import PackedLoader
from evenload.integrations.packed_step import PackedStep, zero_weight_pack
from evenload.types.counted import counted

LOADER_STATE = "evenload_loader"
"""Key of the loader's state in a checkpoint's `client_state`."""
_NUM_STEPS = "evenload_num_steps"


class DeepSpeedLoop(EngineLoop):
    """Steps of a DeepSpeed engine.

    Args:
        engine: of `deepspeed.initialize`, all ranks data-parallel or in sequence groups of neighbours
            (`ulysses.share_sequences`).
        loader: of any numbers of micro-batches where the table above says so, else with `equal_micro_batches`.
        loss: of one micro-batch; default: `hf_pack_loss`. In a sequence group of the rank's share
            (`ulysses.sequence_share`); default: `share_loss`.
        reduce_every_pack: see above; None = as the table says, for stage 2 by the loader's `equal_micro_batches`.

    Raises:
        ConfigError: an engine that would train something else, or wait for ever; a loader as `EngineLoop` says.
    """

    def __init__(
        self,
        engine: Any,
        loader: PackedLoader,
        *,
        loss: PackLoss | None = None,
        reduce_every_pack: bool | None = None,
    ) -> None:
        _refuse_engine(engine)
        ranks = engine.sequence_parallel_size
        super().__init__(engine.module, loader, loss, engine="DeepSpeed", sequence_ranks=ranks)
        self.engine, self._sequence_ranks, self._sequence_rank = engine, ranks, 0
        if ranks > 1:
            require_documents_apart(getattr(engine.module, "config", None))
            self._sequence_rank, self._loss = _place_among(engine, ranks), loss or share_loss
        self._averaged_over = _averaged_over(engine)
        stage = int(engine.zero_optimization_stage())
        options = loader.options
        has_equal_counts = options.equal_micro_batches or options.micro_batches is not None
        if reduce_every_pack is None:
            reduce_every_pack = stage == 3 or (stage == 2 and has_equal_counts)
        if stage == 3:
            self._require_equal_counts("gathers parameters in every forward pass under ZeRO-3")
        elif reduce_every_pack:
            self._require_equal_counts(f"reduces gradients after every micro-batch under ZeRO-{stage}")
        if not reduce_every_pack and not hasattr(engine.optimizer, "_coalesce_grad_reduction"):
            raise ConfigError(
                f"the engine's optimizer is a {type(engine.optimizer).__name__}, whose sums of gradients cannot be put "
                "off to the end of the step (bfloat16 weights under ZeRO-1 with grad_accum_dtype fp32 have it); use "
                "ZeRO-2, or leave data_types.grad_accum_dtype out"
            )
        self._reduce_every_pack = reduce_every_pack

    def accumulate(self, step: PackedStep) -> torch.Tensor:
        """Forward and backward of one global batch; the loss of the global batch. Collective."""
        if self._reduce_every_pack:
            return sum_over_ranks(self._run(step))
        with self.engine.coalesce_grad_reduction():
            total = self._run(step)
        return sum_over_ranks(total)

    def _run(self, step: PackedStep) -> torch.Tensor:
        device = self.engine.device
        total = torch.zeros((), device=device)
        # A rank without any gradient would leave out the reductions that the others wait in.
        batches = step.batches or (self._without_work(step),)
        for index, batch in enumerate(batches):
            if self._reduce_every_pack:
                self.engine.set_gradient_accumulation_boundary(index == len(batches) - 1)
            if self._sequence_ranks > 1:
                batch = sequence_share(batch, self._sequence_rank, self._sequence_ranks)
            loss = self._loss(self.engine, move_batch(batch, device))
            self.engine.backward(loss * self._averaged_over)
            total = total + loss.detach()
        return total

    def _without_work(self, step: PackedStep) -> Any:
        options = self.loader.options
        assert options.format is not None
        return format_pack(zero_weight_pack(options.row_multiple), options.format, step.num_label_tokens)

    def update(self) -> bool:
        """Apply the gradients, clipped and scaled as the engine's configuration says, and forget them. Collective.

        Returns:
            False where DeepSpeed left the update out, because gradients overflowed in fp16.
        """
        self.engine.step()
        return bool(self.engine.was_step_applied())

    def save(self, directory: str | PathLike[str], tag: str | None = None) -> None:
        """The engine's checkpoint with the loader's state and the number of steps in its `client_state`. Collective."""
        client_state = {LOADER_STATE: self.loader.state_dict(), _NUM_STEPS: self.num_steps}
        self.engine.save_checkpoint(str(directory), tag=tag, client_state=client_state)

    def load(self, directory: str | PathLike[str], tag: str | None = None) -> None:
        """Go on from a checkpoint. Collective.

        With another number of ranks from one that DeepSpeed's `ds_to_universal` has made universal, by an engine with
        `"checkpoint": {"load_universal": true}` in its configuration. DeepSpeed has that for Adam only.

        Raises:
            CheckpointError: no such checkpoint, of another number of ranks, or one without a loader's state.
        """
        if not self.engine.load_universal_checkpoint():
            require_same_ranks(Path(directory), tag, self.engine.seq_dp_world_size)
        path, client_state = self.engine.load_checkpoint(str(directory), tag=tag)
        missing = {LOADER_STATE, _NUM_STEPS} - set(client_state or {})
        if path is None or missing:
            raise CheckpointError(
                f"'{directory}' is no checkpoint of this loop (found: {path}, missing: {sorted(missing)}); give the "
                "folder that save wrote"
            )
        self.loader.load_state_dict(client_state[LOADER_STATE])
        self.num_steps = client_state[_NUM_STEPS]


def require_same_ranks(directory: Path, tag: str | None, ranks: int) -> None:
    """A `CheckpointError` where a checkpoint is of another number of ranks. Collective.

    DeepSpeed would find out after it has loaded the weights, and not say what to do.

    Args:
        tag: None = that of the newest one.
    """
    folder, saved = told_by_rank_zero(lambda: _folder_and_ranks(directory, tag), f"'{directory}' cannot be read")
    if saved is not None and saved != ranks:
        raise CheckpointError(
            f"'{folder}' was saved by {counted(saved, 'rank')}, and there are {ranks}; make it universal: python -m "
            f"deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder {folder} --output_folder "
            f'{folder}-universal, and set "checkpoint": {{"load_universal": true}} in the engine\'s configuration'
        )


def _folder_and_ranks(directory: Path, tag: str | None) -> tuple[Path, int | None]:
    """A checkpoint's folder, and what it says of its ranks; None where DeepSpeed will find none itself.

    The files of the other ranks are not counted: they may lie on the disks of other nodes.
    """
    latest = directory / "latest"
    folder = directory / (tag or (latest.read_text().strip() if latest.is_file() else ""))
    # Of ZeRO-1 and 2, and of ZeRO-3.
    for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
        if (folder / name).is_file():
            try:
                # DeepSpeed unpickles it next in any case; so, weights stay on the disk.
                state = torch.load(folder / name, map_location="cpu", mmap=True, weights_only=False)
            except (RuntimeError, EOFError, UnpicklingError) as error:
                raise CheckpointError(f"'{folder / name}' cannot be read: {error}; give another tag") from error
            return folder, state.get("dp_world_size")
    return folder, None


def _refuse_engine(engine: Any) -> None:
    for name in ("coalesce_grad_reduction", "zero_optimization_stage", "gradient_accumulation_steps"):
        if not hasattr(engine, name):
            raise ConfigError(
                f"{type(engine).__name__} has no {name}: give the engine of deepspeed.initialize, of DeepSpeed 0.19.2 "
                "or later"
            )
    if getattr(engine, "pipeline_parallelism", False):
        raise ConfigError(
            "a PipelineModule makes its own micro-batches of one shape and size; train without it, or with 'evenload "
            "train', which has pipelines of packs"
        )
    stage = int(engine.zero_optimization_stage())
    if stage not in (1, 2, 3):
        raise ConfigError(
            f"ZeRO stage is {stage}: without ZeRO the engine cannot put off the sum of gradients; set "
            '"zero_optimization": {"stage": 1} (or 2, 3)'
        )
    if not getattr(engine, "gradient_average", True):
        raise ConfigError(
            'gradient_allreduce_op is "sum", and the loss is multiplied by the number of ranks for the mean that '
            'DeepSpeed takes by default, so gradients would be too large by that; set it to "mean", or leave it out'
        )
    if not getattr(engine, "managed_gradient_accumulation", lambda: True)():
        raise ConfigError(
            "managed_gradient_accumulation is False, with which the engine neither puts off sums of gradients nor is "
            "told the end of a step; leave it out"
        )
    steps = engine.gradient_accumulation_steps()
    if steps != 1:
        raise ConfigError(
            f"gradient_accumulation_steps is {steps}, by which DeepSpeed would divide the gradients; they are divided "
            "by the global batch's label tokens already. Set it to 1 (the plan says how many micro-batches a step has)"
        )
    # With sequence groups the engine shards, sums and counts over both dimensions.
    size, world_size = engine.seq_dp_world_size, dist.get_world_size()
    if size != world_size:
        raise ConfigError(
            f"gradients are summed over {size} ranks of {world_size}: tensor and expert parallel ranks, and sequence "
            "groups of a mesh (sequence_parallel_size in the configuration), are not tested with packs; leave all "
            "ranks data-parallel, or make sequence groups with mpu = share_sequences(model, ranks)"
        )


def _place_among(engine: Any, ranks: int) -> int:
    """This rank's place in its sequence group; a `ConfigError` where the loader deals packs to other groups."""
    members, rank = dist.get_process_group_ranks(engine.get_sequence_parallel_group()), dist.get_rank()
    first = rank // ranks * ranks
    if members != [*range(first, first + ranks)]:
        raise ConfigError(
            f"rank {rank} shares sequences with the ranks {members}, and the loader gives the same packs to "
            f"{[*range(first, first + ranks)]}; make groups of neighbours, as share_sequences does"
        )
    return rank - first


def _averaged_over(engine: Any) -> int:
    """By what DeepSpeed divides the sum of all ranks' gradients.

    With sequence groups that is not one number under ZeRO-3: `__avg_scatter_grads` (zero/stage3.py), which reduces
    and scatters, divides by all ranks, `__avg_scatter_contiguous_grads` by all ranks over those of a group.

    Raises:
        ConfigError: ZeRO-3 with sequence groups where it may take the other way, or in a version not read.
    """
    world_size, ranks = dist.get_world_size(), engine.sequence_parallel_size
    if ranks == 1 or int(engine.zero_optimization_stage()) != 3:
        return world_size // ranks
    version = importlib.metadata.version("deepspeed")
    if not engine.zero_reduce_scatter():
        raise ConfigError(
            "reduce_scatter is false under ZeRO-3 with sequence groups, where DeepSpeed divides the gradients of large "
            "parameters by another number than those of small ones; leave it out, or use ZeRO-2"
        )
    if not version.startswith("0.19."):
        raise ConfigError(
            f"DeepSpeed {version} under ZeRO-3 with sequence groups is not tested: releases 0.19 divide gradients by "
            "all ranks, and this one may not; install deepspeed==0.19.8, or use ZeRO-2"
        )
    return world_size
