"""`DeepSpeedLoop`: trains a DeepSpeed engine (ZeRO-1, 2 or 3) from a `PackedLoader`; `share_sequences`: Ulysses.

Exact gradients: every micro-batch's loss is divided by the label tokens of the global batch, and multiplied by the
number that DeepSpeed divides gradients by, because it takes a mean. Gradients are reduced after every micro-batch, or
once a step (`engine.coalesce_grad_reduction()`), which keeps whole gradients on every rank until then. Each parameter
needs a gradient on all ranks or on none: a rank without documents runs a pack without a loss.

Under Ulysses the ranks of a group share every pack: each has some rows outside of attention, and between two
all-to-alls some heads of all rows. Groups and all-to-alls are DeepSpeed's; attention is `document_attention`, because
`sdpa` runs the pack as one causal sequence.
"""

import importlib.metadata
from collections.abc import Iterator
from contextlib import nullcontext
from os import PathLike
from pathlib import Path
from pickle import UnpicklingError
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from evenload.errors import CheckpointError, ConfigError
from evenload.integrations.engine_loop import EngineLoop, PackLoss, document_attention, from_rank_zero, shifted_labels
from evenload.integrations.packed_loader import PackedLoader, PackedStep
from evenload.types.text import counted

LOADER_STATE = "evenload_loader"
"""Key of the loader's state in a checkpoint's `client_state`."""
_NUM_STEPS = "evenload_num_steps"
DOCUMENTS = "evenload_documents"
"""Name of Evenload's attention among transformers' (`attn_implementation`)."""
_OTHER_ATTENTION = ("dropout", "sliding_window", "softcap", "s_aux")
"""Settings of attention in transformers that `document_attention` does not have."""


class DeepSpeedLoop(EngineLoop):
    """Trains a DeepSpeed engine.

    Args:
        engine: of `deepspeed.initialize`, all ranks data-parallel or in sequence groups (`share_sequences`).
        loader: with `equal_micro_batches` under ZeRO-3 and where gradients are reduced after every micro-batch.
        loss: of one micro-batch, in a sequence group of the rank's share (`sequence_share`); default: `hf_pack_loss`.
        reduce_every_pack: reduce gradients after every micro-batch; default: under ZeRO-3, and ZeRO-2 of equal counts.

    Raises a `ConfigError` for an engine or loader that would train something else, or wait for ever.
    """

    def __init__(
        self, engine: Any, loader: PackedLoader, *, loss: PackLoss | None = None, reduce_every_pack: bool | None = None
    ) -> None:
        for message in _unfit(engine):
            raise ConfigError(message)
        ranks = engine.sequence_parallel_size
        super().__init__(engine.module, loader, loss, engine="DeepSpeed", device=engine.device, sequence_ranks=ranks)
        self.engine, self._sequence_ranks, self._sequence_rank = engine, ranks, 0
        self._called = engine
        if ranks > 1:
            name = getattr(getattr(engine.module, "config", None), "_attn_implementation", None)
            if name != DOCUMENTS and "flash_attention" not in str(name):
                why = "which under Ulysses runs a pack as one sequence, so its documents would see each other"
                raise ConfigError(f"attention is '{name}', {why}; call mpu = share_sequences(model, ranks)")
            self._sequence_rank = _place_among(engine, ranks)
        self._averaged_over = _averaged_over(engine)
        stage = int(engine.zero_optimization_stage())
        if reduce_every_pack is None:
            reduce_every_pack = stage == 3 or (stage == 2 and loader.options.has_equal_counts)
        if stage == 3:
            self._require_equal_counts("gathers parameters in every forward pass under ZeRO-3")
        elif reduce_every_pack:
            self._require_equal_counts(f"reduces gradients after every micro-batch under ZeRO-{stage}")
        if not reduce_every_pack and not hasattr(engine.optimizer, "_coalesce_grad_reduction"):
            what = "whose sums of gradients cannot be put off to the end of the step"
            fix = "use ZeRO-2, or leave data_types.grad_accum_dtype out"
            raise ConfigError(f"the engine's optimizer is a {type(engine.optimizer).__name__}, {what}; {fix}")
        self._reduce_every_pack = reduce_every_pack

    def accumulate(self, step: PackedStep) -> Tensor:
        """Run forward and backward of one global batch, and return its loss. Collective."""
        with nullcontext() if self._reduce_every_pack else self.engine.coalesce_grad_reduction():
            return super().accumulate(step)

    def _own_share(self, batch: Any) -> Any:
        ranks = self._sequence_ranks
        return sequence_share(batch, self._sequence_rank, ranks) if ranks > 1 else batch

    def _run(self, batch: Any, is_last: bool) -> Tensor:
        if self._reduce_every_pack:
            self.engine.set_gradient_accumulation_boundary(is_last)
        loss = self._loss(self.engine, self._own_share(batch))
        self.engine.backward(loss * self._averaged_over)
        return loss

    def update(self) -> bool:
        """Apply the gradients as the engine is configured; return False where they overflowed in fp16. Collective."""
        self.engine.step()
        return bool(self.engine.was_step_applied())

    def save(self, directory: str | PathLike[str], tag: str | None = None) -> None:
        """Write the engine's checkpoint, with the loader's state and the number of steps in it. Collective."""
        client_state = {LOADER_STATE: self.loader.state_dict(), _NUM_STEPS: self.num_steps}
        self.engine.save_checkpoint(str(directory), tag=tag, client_state=client_state)

    def load(self, directory: str | PathLike[str], tag: str | None = None) -> None:
        """Go on from a checkpoint. Collective. With another number of ranks it has to be universal (DeepSpeed's
        `ds_to_universal`, Adam only), and the engine's configuration to have `"checkpoint": {"load_universal": true}`.
        Raises a `CheckpointError` for no such checkpoint, of other ranks, or without a loader's state."""
        if not self.engine.load_universal_checkpoint():
            require_same_ranks(Path(directory), tag, self.engine.seq_dp_world_size)
        path, client_state = self.engine.load_checkpoint(str(directory), tag=tag)
        missing = {LOADER_STATE, _NUM_STEPS} - set(client_state or {})
        if path is None or missing:
            what = f"is no checkpoint of this loop (read: {path}, missing: {sorted(missing)})"
            raise CheckpointError(f"'{directory}' {what}; give the folder that save wrote")
        self.loader.load_state_dict(client_state[LOADER_STATE])
        self.num_steps = client_state[_NUM_STEPS]


def require_same_ranks(directory: Path, tag: str | None, ranks: int) -> None:
    """Raise a `CheckpointError` where a checkpoint (without a tag the newest) is of other ranks, by what it states:
    files of other ranks may lie on the disks of other nodes. Collective."""

    def check() -> None:
        latest = directory / "latest"
        folder = directory / (tag or (latest.read_text().strip() if latest.is_file() else ""))
        # Of ZeRO-1 and 2, and of ZeRO-3.
        for name in ("mp_rank_00_model_states.pt", "zero_pp_rank_0_mp_rank_00_model_states.pt"):
            if not (folder / name).is_file():
                continue
            try:
                # DeepSpeed unpickles it next in any case. With mmap, weights stay on the disk.
                state = torch.load(folder / name, map_location="cpu", mmap=True, weights_only=False)
            except (RuntimeError, EOFError, UnpicklingError) as error:
                raise CheckpointError(f"'{folder / name}' cannot be read: {error}; give another tag") from error
            if (saved := state.get("dp_world_size")) not in (None, ranks):
                command = "python -m deepspeed.checkpoint.ds_to_universal --inject_missing_state --input_folder "
                command += f"{folder} --output_folder {folder}-universal"
                raise CheckpointError(
                    f"'{folder}' was saved by {counted(saved, 'rank')}, and there are {ranks}; make it universal: "
                    f'{command}, and set "checkpoint": {{"load_universal": true}} in the engine\'s configuration'
                )

    from_rank_zero(check, f"'{directory}' cannot be read")


def _unfit(engine: Any) -> Iterator[str]:
    """Yield why the engine would train something else, or wait for ever."""
    for name in ("coalesce_grad_reduction", "zero_optimization_stage", "gradient_accumulation_steps"):
        if not hasattr(engine, name):
            yield f"{type(engine).__name__} has no {name}; give deepspeed.initialize's engine, of 0.19.2 or later"
    if getattr(engine, "pipeline_parallelism", False):
        yield "a PipelineModule makes micro-batches of one shape; train without it, or with 'evenload train'"
    if (stage := int(engine.zero_optimization_stage())) not in (1, 2, 3):
        yield f'ZeRO stage is {stage}, which cannot defer reductions; set "zero_optimization": {{"stage": 1}} (or 2, 3)'
    if not getattr(engine, "gradient_average", True):
        yield 'gradient_allreduce_op is "sum", and the loss is multiplied for a mean; set it to "mean"'
    if not getattr(engine, "managed_gradient_accumulation", lambda: True)():
        yield "managed_gradient_accumulation is False, so the engine never learns the end of a step; leave it out"
    if (steps := engine.gradient_accumulation_steps()) != 1:
        yield f"gradient_accumulation_steps is {steps}; set it to 1, as the plan has the number of micro-batches"
    # With sequence groups the engine shards, sums and counts over both dimensions.
    if (size := engine.seq_dp_world_size) != dist.get_world_size():
        fix = "leave all data-parallel, or use mpu = share_sequences(model, ranks)"
        yield f"gradients are summed over {size} ranks of {dist.get_world_size()}, which is not tested; {fix}"


def _place_among(engine: Any, ranks: int) -> int:
    """Return this rank's place in its sequence group; a `ConfigError` where the loader gives other ranks its packs."""
    members, rank = dist.get_process_group_ranks(engine.get_sequence_parallel_group()), dist.get_rank()
    if members != (neighbours := [rank // ranks * ranks + place for place in range(ranks)]):
        raise ConfigError(f"rank {rank} shares sequences with {members}; groups are of neighbours, here {neighbours}")
    return rank % ranks


def _averaged_over(engine: Any) -> int:
    """Return the number by which DeepSpeed divides the sum of all ranks' gradients."""
    world_size, ranks = dist.get_world_size(), engine.sequence_parallel_size
    if ranks == 1 or int(engine.zero_optimization_stage()) != 3:
        return world_size // ranks
    # `__avg_scatter_grads` (zero/stage3.py) divides by all ranks, `__avg_scatter_contiguous_grads` by the groups.
    version = importlib.metadata.version("deepspeed")
    if not engine.zero_reduce_scatter():
        raise ConfigError("reduce_scatter is false under ZeRO-3 with sequence groups; leave it out, or use ZeRO-2")
    if not version.startswith("0.19."):
        fix = "install deepspeed==0.19.8, or use ZeRO-2"
        raise ConfigError(f"DeepSpeed {version} is not tested under ZeRO-3 with sequence groups; {fix}")
    return world_size


def share_sequences(model: Any, ranks: int) -> SimpleNamespace | None:
    """Let groups of `ranks` neighbouring ranks share every pack of a transformers model. Collective, once a process,
    after `deepspeed.init_distributed()`, before `deepspeed.initialize(..., mpu=)`, for which it returns DeepSpeed's
    module of groups; sets the model's attention. With 1 rank it changes nothing and returns None.

    Raises:
        ConfigError: `ranks` do not divide the query heads, or neither divide the key heads nor are a multiple of them;
            or the model's attention cannot be set.
    """
    if ranks == 1:
        return None
    import deepspeed  # type: ignore[missing-import]
    from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF  # type: ignore[missing-import]
    from transformers import AttentionInterface

    if not deepspeed.comm.is_initialized():
        raise ConfigError("DeepSpeed's process group is not there yet; call deepspeed.init_distributed() first")
    if DOCUMENTS not in AttentionInterface().valid_keys():
        AttentionInterface.register(DOCUMENTS, _transformers_attention)
    model.set_attn_implementation(DOCUMENTS)
    if model.config._attn_implementation != DOCUMENTS:
        raise ConfigError(f"the attention of {type(model).__name__} cannot be set; use sequence_ranks=1")
    try:
        groups = UlyssesSPAttentionHF.register_with_transformers(model, DOCUMENTS, ranks, micro_batch_size=1)
    except (AssertionError, RuntimeError, ValueError) as error:
        raise ConfigError(f"DeepSpeed cannot share sequences among {ranks} ranks: {error}") from error
    # As they stand DeepSpeed takes them for model-parallel ones, and checkpoints could not be made universal.
    no_tensor_ranks = {"get_tensor_model_parallel_world_size": lambda: 1, "get_tensor_model_parallel_rank": lambda: 0}
    return SimpleNamespace(**vars(groups) | no_tensor_ranks)


def sequence_share(batch: dict[str, Any], rank: int, ranks: int) -> dict[str, Any]:
    """Return a rank's rows of an `hf` batch of T tokens; a `ConfigError` where `ranks` does not divide them.

    `input_ids`, `position_ids`, `seq_idx` are then [1, T / ranks], `shift_labels` [1, T / ranks] take the place of
    `labels` (row i has the label of token i + 1, which may lie on the next rank), and all else is as it was.
    """
    if (tokens := batch["input_ids"].shape[1]) % ranks:
        fix = f"make the loader with sequence_ranks={ranks}"
        raise ConfigError(f"a pack of {tokens} tokens cannot be shared by {ranks} ranks; {fix}")
    rows = slice(rank * tokens // ranks, (rank + 1) * tokens // ranks)
    share = {key: value for key, value in batch.items() if key != "labels"} | {"shift_labels": shifted_labels(batch)}
    own = {key: share[key][:, rows].contiguous() for key in ("input_ids", "position_ids", "seq_idx", "shift_labels")}
    return share | own


def _transformers_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **settings: Any
) -> tuple[Tensor, None]:
    """Attend as transformers' `AttentionInterface` wants it: query [1, H, T, D], key and value [1, G, T, D] →
    [1, T, H, D], and no weights."""
    unknown = [name for name in _OTHER_ATTENTION if isinstance(settings.get(name), Tensor) or settings.get(name)]
    if unknown:
        what = f"{type(module).__name__} attends with {', '.join(unknown)}"
        raise ConfigError(f"{what}, which attention '{DOCUMENTS}' does not have; use sequence_ranks=1")
    edges = settings.get("cu_seq_lens_q")
    if edges is None or attention_mask is not None or query.shape[0] != 1:
        what = "trains packs of a PackedLoader with format='hf' only, without attention_mask"
        raise ConfigError(f"attention '{DOCUMENTS}' {what}")
    q, k, v = (part[0].transpose(0, 1).contiguous() for part in (query, key, value))
    return document_attention(q, k, v, edges, settings["scaling"])[None], None
