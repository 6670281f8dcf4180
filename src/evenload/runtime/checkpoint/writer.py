"""`Saves`: when a run saves, and what becomes of it; `CheckpointWriter`: saves while training goes on.

*Staging*, in the training loop, copies this rank's part of weights and optimizer into host buffers that every save
uses. *Writing*, in a thread with a process group of its own: `torch.distributed.checkpoint` writes the copies, rank 0
adds the small files, and when every rank has written the directory is renamed and older checkpoints are removed. One
save at a time. When any rank fails, all ranks learn which and why, what was written is removed, and every earlier
checkpoint is as it was.

Price: the loop waits for one copy in memory (`stall_s`); host memory holds weights / replicas + AdamW state once more.
Why not `async_save`: docs/decisions/16-checkpoints-stops-and-losses.md.
"""

import contextlib
import hashlib
import os
import shutil
import threading
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
from evenload.errors import CheckpointError
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
    note_best,
    partial_path,
    prune_checkpoints,
    put_in_place,
    remove_leftovers,
    saved_passes,
    sync,
)
from evenload.runtime.checkpoint.pieces import METADATA_FILE, Piece, PieceSavePlanner, TensorPieces, whole_tensor
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.optim.optimizer import ShardedOptimizer
from evenload.runtime.optim.parameter_units import FlatBuffer

_PROBE_BYTES = 4_000_000


@dataclass(frozen=True)
class SavedCheckpoint:
    """A complete checkpoint: bytes of all ranks, seconds that training waited, and that writing took."""

    path: Path
    steps_done: int
    num_bytes: int
    stall_s: float
    write_s: float


class CheckpointWriter:
    """Saves one run; every rank makes the same calls at the same steps. `keep` complete checkpoints stay, 0 = all."""

    def __init__(
        self,
        directory: Path,
        buffers: list[FlatBuffer],
        optimizer: ShardedOptimizer,
        mesh: Mesh,
        *,
        keep: int,
        keep_best: int,
    ) -> None:
        self._directory, self._mesh, self._keep, self._keep_best = directory, mesh, keep, keep_best
        self._buffers, self._optimizer = buffers, optimizer
        self._staged: dict[str, TensorPieces] = {}
        self._thread: threading.Thread | None = None
        self._outcome: SavedCheckpoint | BaseException | None = None

    def move_to(self, buffers: list[FlatBuffer], optimizer: ShardedOptimizer, mesh: Mesh) -> None:
        """The next saves are of another layout; one that is under way has its copies."""
        self._buffers, self._optimizer, self._mesh = buffers, optimizer, mesh
        self._staged = {}

    def start(self, position: RunPosition, from_s: float) -> None:
        """Copy what is to be saved and write it in the background; `wait` first. Training stopped at `from_s`."""
        assert self._thread is None, "one save at a time"
        tensors = self._stage(position.progress.steps_done)
        stall_s = time.perf_counter() - from_s
        # A daemon: when training fails, the process must end although this thread may wait for a dead rank.
        self._thread = threading.Thread(
            target=self._run, args=(position, tensors, stall_s), name="evenload-checkpoint", daemon=True
        )
        self._thread.start()

    def wait(self, *, only_if_done: bool = False) -> SavedCheckpoint | None:
        """Return the save that ended, None = there is none. `CheckpointError` where it failed."""
        if self._thread is None or (only_if_done and self._thread.is_alive()):
            return None
        self._thread.join()
        self._thread, outcome, self._outcome = None, self._outcome, None
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    def _stage(self, steps_done: int) -> dict[str, TensorPieces]:
        """Copies of this rank's part, in buffers that stay."""
        self._optimizer.gathers.finish()  # replicas write parts of whole weights
        mine = tensors_to_write(run_tensors(self._buffers, self._optimizer, self._mesh), self._mesh)
        mine |= random_tensors(self._mesh)
        if self._mesh.rank == 0:
            mine[STEPS_TENSOR] = whole_tensor(torch.tensor([steps_done]))
        is_pinned = self._mesh.device.type == "cuda"
        for name, part in mine.items():
            if name not in self._staged:
                copies = (
                    Piece(piece.offsets, torch.empty_like(piece.local, device="cpu", pin_memory=is_pinned))
                    for piece in part.pieces
                )
                self._staged[name] = TensorPieces(part.shape, tuple(copies))
            for piece, copy in zip(part.pieces, self._staged[name].pieces, strict=True):
                copy.local.copy_(piece.local, non_blocking=True)
        if is_pinned:
            torch.cuda.current_stream(self._mesh.device).synchronize()
        return dict(self._staged)

    def _run(self, position: RunPosition, tensors: dict[str, TensorPieces], stall_s: float) -> None:
        try:
            from_s, steps_done = time.perf_counter(), position.progress.steps_done
            num_bytes = self._write(position, tensors)
            path, write_s = checkpoint_path(self._directory, steps_done), time.perf_counter() - from_s
            self._outcome = SavedCheckpoint(path, steps_done, num_bytes, stall_s, write_s)
        except BaseException as error:
            self._outcome = error

    def _write(self, position: RunPosition, tensors: dict[str, TensorPieces]) -> int:
        partial = partial_path(self._directory, position.progress.steps_done)
        local_bytes = sum(tensor.num_bytes for tensor in tensors.values())
        num_bytes = sum(self._together(lambda: self._make_room(partial), partial, local_bytes, 0))
        try:
            save(tensors, checkpoint_id=partial, planner=PieceSavePlanner(), process_group=self._mesh.saving)
        except CheckpointException as error:
            self._give_up(first_failure(error), partial, num_bytes)
        except RuntimeError as error:
            raise CheckpointError(
                f"checkpoint {partial} was not completed, because a rank died or took longer than "
                f"train.checkpoint_timeout_s ({' '.join(str(error).split())}); the next run starts from "
                f"{latest_checkpoint(self._directory) or 'the beginning'}"
            ) from error
        self._together(lambda: self._complete(position, partial), partial, 0, num_bytes)
        self._together(lambda: self._prune(position.progress.best), None, 0, num_bytes)
        return num_bytes

    def _make_room(self, partial: Path) -> None:
        self._directory.mkdir(parents=True, exist_ok=True)
        remove_leftovers(self._directory)
        partial.mkdir()

    def _complete(self, position: RunPosition, partial: Path) -> None:
        """The small files, the one that makes it a checkpoint last, and the name."""
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
        saved = saved_passes(self._directory, best, self._keep_best)
        note_best(self._directory, saved)
        prune_checkpoints(self._directory, self._keep, {one.steps_done for one in saved})

    def _together(self, work: Callable[[], None], partial: Path | None, local_bytes: int, num_bytes: int) -> list[int]:
        """Rank 0 does `work`; all ranks learn whether it failed. Returns `local_bytes` of every rank."""
        answer = (local_bytes, "")
        if self._mesh.rank == 0:
            try:
                work()
            except OSError as error:
                answer = (local_bytes, f"rank 0: {type(error).__name__}: {error}")
        answers: list[tuple[int, str]] = [(0, "")] * self._mesh.num_ranks
        dist.all_gather_object(answers, answer, group=self._mesh.saving)
        sizes = [size for size, _ in answers]
        if answers[0][1]:
            self._give_up(answers[0][1], partial, num_bytes or sum(sizes))
        return sizes

    def _give_up(self, cause: str, partial: Path | None, num_bytes: int) -> None:
        """On every rank raise rank 0's account of the failure, after it has removed what was written."""
        message = [""]
        refused: list[str] = [""] * self._mesh.num_ranks
        if partial is not None:
            mine = _refusal(partial, self._mesh.rank)
            dist.all_gather_object(refused, mine, group=self._mesh.saving)
        if self._mesh.rank == 0:
            message = [self._account("; ".join([cause, *filter(None, refused)]), partial, num_bytes)]
            if partial is not None:
                # What cannot be removed now is removed before the next save.
                shutil.rmtree(partial, ignore_errors=True)
        dist.broadcast_object_list(message, src=0, group=self._mesh.saving)
        raise CheckpointError(message[0])

    def _account(self, cause: str, partial: Path | None, num_bytes: int) -> str:
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
    """What the system says to a small file there, or "": torch keeps the reason of a short write to itself."""
    try:
        with (directory / f"probe-{rank}").open("wb") as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())
    except OSError as error:
        return f"rank {rank} cannot write {_PROBE_BYTES / 1e6:.0f} MB there: {error.strerror}"
    return ""


class Saves:
    """Saves a run on one rank; `position` is called when a save starts."""

    def __init__(self, settings: RunConfig, writer: CheckpointWriter, position: Callable[[], RunPosition]) -> None:
        self._settings, self._writer, self._position = settings, writer, position
        self._directory = checkpoints_of(settings.output_dir)
        self._saved_steps = -1
        self._saved_at_s = time.monotonic()
        self._settled: tuple[SavedCheckpoint | None, str] | None = None

    def note_resumed(self, steps_done: int) -> None:
        """A checkpoint holds the steps done."""
        self._saved_steps = steps_done

    def move_to(self, buffers: list[FlatBuffer], optimizer: ShardedOptimizer, mesh: Mesh) -> None:
        """Saves are of that state from now on."""
        self._writer.move_to(buffers, optimizer, mesh)

    def begin(self) -> None:
        self._saved_at_s = time.monotonic()

    def is_time(self) -> bool:
        """`train.checkpoint_every_s` has passed on this rank's clock since the last save."""
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

    def save(self, steps_done: int, *, again: bool = False) -> Path:
        """Have a complete checkpoint of the steps done, written `again` if asked, or `CheckpointError`. Collective."""
        self._end()
        if again or self._saved_steps != steps_done:
            self._start(time.perf_counter())
            self._writer.wait()
        return checkpoint_path(self._directory, steps_done)

    def newest(self) -> Path | None:
        """The newest checkpoint, once the one under way has ended; for a run that gives up for another reason."""
        with contextlib.suppress(CheckpointError):  # the error that counts is why the run ends
            self._end()
        return latest_checkpoint(self._directory)

    def _start(self, from_s: float) -> None:
        position = self._position()
        self._writer.start(position, from_s)
        self._saved_steps, self._saved_at_s = position.progress.steps_done, time.monotonic()

    def _end(self, *, only_if_done: bool = False) -> tuple[SavedCheckpoint | None, str]:
        if self._settled is not None:
            outcome, self._settled = self._settled, None
            return outcome
        try:
            return self._writer.wait(only_if_done=only_if_done), ""
        except CheckpointError as error:
            self._saved_steps = -1
            if self._settings.on_failed_checkpoint == "stop":
                raise
            return None, str(error)
