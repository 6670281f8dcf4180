"""`Saves`: saves a run while training goes on.

*Staging*, in the training loop, copies this rank's part of weights and optimizer state into host buffers that every
save uses. *Writing*, in a thread with a process group of its own: `torch.distributed.checkpoint` writes the copies,
rank 0 adds the small files, and when every rank has written the directory is renamed and older checkpoints are removed.
One save at a time. When any rank fails, all ranks raise the same error, what was written is removed, and every earlier
checkpoint is as it was.

Price: the loop waits for one copy in memory (`stall_s`); host memory holds weights / replicas + AdamW state once more.
"""

import contextlib
import functools
import hashlib
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_saver import save

from evenload.config.sections import RunConfig
from evenload.cost.coefficients import write_coefficients
from evenload.errors import CheckpointError, ConfigError
from evenload.runtime.checkpoint.checkpoint import (
    COST_FILE,
    LOADER_FILE,
    STEPS_TENSOR,
    RunPosition,
    first_failure,
    random_tensors,
    run_tensors,
    tensors_to_write,
)
from evenload.runtime.checkpoint.directory import (
    PROGRESS_FILE,
    BestPass,
    checkpoint_path,
    checkpoints_of,
    latest_checkpoint,
    partial_path,
    prune_checkpoints,
    put_in_place,
    remove_leftovers,
    saved_passes,
    sync,
    write_best,
)
from evenload.runtime.checkpoint.pieces import METADATA_FILE, PieceSavePlanner, TensorPieces, whole_tensor
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.comm.watch import Background
from evenload.runtime.stages.rank_state import RankState
from evenload.types.text import format_bytes

_PROBE_BYTES = 4_000_000


def require_room(run: RunConfig, num_bytes: int) -> None:
    """Raise `ConfigError` where checkpoints of `num_bytes`, those kept and one being written, do not fit."""
    directory, every = checkpoints_of(run.output_dir), run.checkpoint_every_steps
    by_time = run.checkpoint_interval_s or run.keep_best
    most = run.keep_checkpoints + run.keep_best + 1 if run.keep_checkpoints and (every or by_time) else 1
    if run.steps is not None:
        most = min(most, run.steps if by_time else -(-run.steps // max(1, every)))
    place = next(path for path in (directory.absolute(), *directory.absolute().parents) if path.exists())
    free_bytes = shutil.disk_usage(place).free
    there_bytes = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    if most * num_bytes > free_bytes + there_bytes:
        raise ConfigError(
            f"train.output_dir is {run.output_dir}, where {format_bytes(free_bytes)} are free and checkpoints have "
            f"{format_bytes(there_bytes)}; they need {format_bytes(most * num_bytes)}: {most} of "
            f"{format_bytes(num_bytes)}, with the one that is being written (train.keep_checkpoints = "
            f"{run.keep_checkpoints}, train.keep_best = {run.keep_best}). Keep fewer, save less often "
            "(train.checkpoint_every_steps, train.checkpoint_every_s), or choose another directory"
        )


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint: bytes of all ranks, seconds that training waited, and that writing took."""

    path: Path
    steps_done: int
    num_bytes: int
    stall_s: float
    write_s: float


class Saves:
    """Saves a run on one rank; every rank makes the same calls at the same steps."""

    def __init__(self, settings: RunConfig, state: RankState, position: Callable[[], RunPosition]) -> None:
        self._settings, self._state, self._position = settings, state, position
        self._directory = checkpoints_of(settings.output_dir)
        self._staged: dict[str, TensorPieces] = {}
        self._staged_in: Mesh | None = None
        self._writing: Background[SavedCheckpoint] | None = None
        self._settled: tuple[SavedCheckpoint | None, str] | None = None
        self.saved_steps = -1
        """Steps done of the newest checkpoint; -1 = there is none."""
        self._saved_at_s = time.monotonic()

    def is_time(self) -> bool:
        interval_s = self._settings.checkpoint_interval_s
        return bool(interval_s) and time.monotonic() - self._saved_at_s >= interval_s

    def after_step(self, steps_done: int, *, is_time: bool) -> tuple[SavedCheckpoint | None, str]:
        """Start a checkpoint where one is due; return (what was completed, what failed) since then. Collective."""
        from_s, every = time.perf_counter(), self._settings.checkpoint_every_steps
        if not (is_time or (every and steps_done % every == 0)):
            return self._end(only_if_done=True)
        outcome = self._end()
        self._start(from_s)
        return outcome if self._settings.background_checkpoints else self._end()

    def settle(self) -> None:
        """Wait for the save under way; the next `after_step` returns what became of it. Collective."""
        self._settled = self._end()

    def save(self, steps_done: int) -> Path:
        """Have a complete checkpoint of the steps done; raise `CheckpointError`. Collective."""
        self._end()
        if self.saved_steps != steps_done:
            self._start(time.perf_counter())
            self._wait()
        return checkpoint_path(self._directory, steps_done)

    def newest(self) -> Path | None:
        """Return the newest checkpoint, once the one under way has ended; for a run that ends for another reason."""
        with contextlib.suppress(CheckpointError):  # the error that counts is why the run ends
            self._end()
        return latest_checkpoint(self._directory)

    def _start(self, from_s: float) -> None:
        """Copy what is to be saved and write it in the background. Training stopped at `from_s`."""
        assert self._writing is None, "one save at a time"
        position = self._position()
        tensors, mesh = self._stage(position.progress.steps_done), self._state.mesh
        stall_s = time.perf_counter() - from_s

        def write() -> SavedCheckpoint:
            from_s, path = time.perf_counter(), checkpoint_path(self._directory, position.progress.steps_done)
            num_bytes = self._write(position, tensors, mesh)
            return SavedCheckpoint(path, position.progress.steps_done, num_bytes, stall_s, time.perf_counter() - from_s)

        self._writing = Background(write, "evenload-checkpoint")
        self.saved_steps, self._saved_at_s = position.progress.steps_done, time.monotonic()

    def _end(self, *, only_if_done: bool = False) -> tuple[SavedCheckpoint | None, str]:
        if self._settled is not None:
            outcome, self._settled = self._settled, None
            return outcome
        try:
            return self._wait(only_if_done=only_if_done), ""
        except CheckpointError as error:
            self.saved_steps = -1
            if self._settings.on_failed_checkpoint == "stop":
                raise
            return None, str(error)

    def _wait(self, *, only_if_done: bool = False) -> SavedCheckpoint | None:
        if self._writing is None or (only_if_done and self._writing.is_alive()):
            return None
        writing, self._writing = self._writing, None
        return writing.result()

    def _stage(self, steps_done: int) -> dict[str, TensorPieces]:
        """Copy this rank's part into buffers that stay as long as the layout does."""
        mesh = self._state.mesh
        if mesh is not self._staged_in:
            self._staged, self._staged_in = {}, mesh
        mine = tensors_to_write(run_tensors(self._state), mesh) | random_tensors(mesh)
        if mesh.rank == 0:
            mine[STEPS_TENSOR] = whole_tensor(torch.tensor([steps_done]))
        is_pinned = mesh.device.type == "cuda"
        new_copy = functools.partial(torch.empty_like, device="cpu", pin_memory=is_pinned)
        for name, part in mine.items():
            if name not in self._staged:
                self._staged[name] = TensorPieces(part.shape, {at: new_copy(one) for at, one in part.pieces.items()})
            for at, piece in part.pieces.items():
                self._staged[name].pieces[at].copy_(piece, non_blocking=True)
        if is_pinned:
            torch.cuda.current_stream(mesh.device).synchronize()
        return dict(self._staged)

    def _write(self, position: RunPosition, tensors: dict[str, TensorPieces], mesh: Mesh) -> int:
        """Write a checkpoint; return the bytes of all ranks. Collective, in the thread that writes."""
        partial = partial_path(self._directory, position.progress.steps_done)
        total = torch.tensor([sum(tensor.num_bytes for tensor in tensors.values())])
        dist.all_reduce(total, group=mesh.saving)
        num_bytes = int(total)
        self._on_rank_zero(lambda: self._make_room(partial), mesh, partial, num_bytes)
        planner = PieceSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        try:
            save(tensors, checkpoint_id=partial, planner=planner, process_group=mesh.saving)
        except CheckpointException as error:
            self._give_up(first_failure(error), mesh, partial, num_bytes)
        except RuntimeError as error:
            raise CheckpointError(
                f"checkpoint {partial} was not completed: a rank died or took longer than train.checkpoint_timeout_s "
                f"({' '.join(str(error).split())}); go on from {latest_checkpoint(self._directory) or 'the beginning'}"
            ) from error
        self._on_rank_zero(lambda: self._complete(position, partial), mesh, partial, num_bytes)
        self._on_rank_zero(lambda: self._prune(position.progress.best), mesh, None, num_bytes)
        return num_bytes

    def _make_room(self, partial: Path) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._directory)
        partial.mkdir()

    def _complete(self, position: RunPosition, partial: Path) -> None:
        """Write the small files, the one that makes it a checkpoint last, and rename."""
        (partial / LOADER_FILE).write_bytes(position.loader)
        if position.coefficients is not None:
            write_coefficients(partial / COST_FILE, position.coefficients)
        for name in (LOADER_FILE, COST_FILE, METADATA_FILE):
            if (partial / name).is_file():
                sync(partial / name)
        progress = msgspec.structs.replace(position.progress, loader_digest=hashlib.sha256(position.loader).hexdigest())
        (partial / PROGRESS_FILE).write_bytes(msgspec.json.encode(progress))
        sync(partial / PROGRESS_FILE)
        sync(partial)
        put_in_place(partial, checkpoint_path(self._directory, position.progress.steps_done))

    def _prune(self, best: tuple[BestPass, ...]) -> None:
        saved = saved_passes(self._directory, best, self._settings.keep_best)
        write_best(self._directory, saved)
        prune_checkpoints(self._directory, self._settings.keep_checkpoints, {one.steps_done for one in saved})

    def _on_rank_zero(self, work: Callable[[], None], mesh: Mesh, partial: Path | None, num_bytes: int) -> None:
        """Have rank 0 do `work`; raise `CheckpointError` on every rank where it failed."""
        cause = [""]
        if mesh.rank == 0:
            try:
                work()
            except OSError as error:
                cause = [f"rank 0: {type(error).__name__}: {error}"]
        dist.broadcast_object_list(cause, src=0, group=mesh.saving)
        if cause[0]:
            self._give_up(cause[0], mesh, partial, num_bytes)

    def _give_up(self, cause: str, mesh: Mesh, partial: Path | None, num_bytes: int) -> None:
        """Raise rank 0's description of the failure on every rank, after it has removed what was written."""
        message = [""]
        refused: list[str] = [""] * mesh.num_ranks
        if partial is not None:
            dist.all_gather_object(refused, _refusal(partial, mesh.rank), group=mesh.saving)
        if mesh.rank == 0:
            message = [self._describe_failure("; ".join([cause, *filter(None, refused)]), partial, num_bytes)]
            if partial is not None:
                # What cannot be removed now is removed before the next save.
                shutil.rmtree(partial, ignore_errors=True)
        dist.broadcast_object_list(message, src=0, group=mesh.saving)
        raise CheckpointError(message[0])

    def _describe_failure(self, cause: str, partial: Path | None, num_bytes: int) -> str:
        last = latest_checkpoint(self._directory)
        if partial is None:
            return (
                f"older checkpoints in {self._directory} could not be removed ({cause}); the newest, {last}, is "
                "complete. Remove them, or set train.keep_checkpoints = 0"
            )
        place = next(path for path in (partial, *partial.absolute().parents) if path.exists())
        return (
            f"checkpoint {partial.name.removeprefix('.').removesuffix('.partial')} of {num_bytes / 1e6:,.1f} MB could "
            f"not be written to {self._directory}, where {shutil.disk_usage(place).free / 1e6:,.1f} MB are free "
            f"({cause}); {f'the one before, {last}, is intact' if last else 'there is no earlier one'}. Free space, "
            "lower train.keep_checkpoints, or choose another train.output_dir"
        )


def _refusal(directory: Path, rank: int) -> str:
    """Return why the system refuses a small file there, or "": torch hides the reason of a short write."""
    try:
        with (directory / f"probe-{rank}").open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        return f"rank {rank} cannot write {_PROBE_BYTES / 1e6:.0f} MB there: {error.strerror}"
    return ""
