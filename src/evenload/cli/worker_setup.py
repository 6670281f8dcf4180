"""What every rank of a command does first: threads, process groups, costs, memory limit."""

import os
import platform
import sys
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console

from evenload.calibrate.calibrate import calibrate
from evenload.calibrate.cost_cache import cached_path, read_cached, write_cached
from evenload.calibrate.overlap import measured_overlap
from evenload.cli.cost_lines import cost_file_warnings
from evenload.cost.coefficients import CostCoefficients, OverlapCost, read_coefficients
from evenload.cost.coverage import missing_costs, require_covered
from evenload.plan.search.usable_cores import usable_cores
from evenload.runtime.comm.membership import Membership
from evenload.runtime.comm.mesh import Mesh, Meshes, create_meshes
from evenload.runtime.comm.scalars import least_of_ranks
from evenload.runtime.comm.warm_up import warm_up
from evenload.runtime.config.machine_memory import process_memory_bytes
from evenload.runtime.config.run_config import RunConfig
from evenload.runtime.config.train_config import TrainConfig
from evenload.runtime.device import rank_device, require_device, use_deterministic_kernels
from evenload.runtime.trainer import Trainer
from evenload.types.layout import ParallelLayout
from evenload.types.transfers import ChannelChoice, channel_mode

# Of a GPU, for CUDA, NCCL's buffers and what the allocator cannot use in one piece.
_FREE_DEVICE_SHARE = 0.1
# The thread that plans coming steps lets the one that feeds a GPU go on after so long; Python's own 5 ms are a thousand
# launches.
_SWITCH_INTERVAL_S = 2e-4
_ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


@dataclass(frozen=True, eq=False, kw_only=True)
class RankSetup:
    """One process as a rank, with its threads and what it may hold."""

    meshes: Meshes
    threads: int
    memory_cap_bytes: int

    @property
    def mesh(self) -> Mesh:
        """Of the layout in which the run starts."""
        return self.meshes.start

    @property
    def demand(self) -> float:
        """Threads that this machine's ranks compute with, for each core that they may use."""
        return computing_demand(self.threads)


def started_rank(
    config: TrainConfig, *layouts: ParallelLayout, members: Membership | None = None
) -> AbstractContextManager[RankSetup]:
    """Join the other processes of this job, with groups for these layouts; the run starts in the first."""
    return joined_rank(config.train, layouts, config.parallel.channels, config.plan.memory_bytes, members)


@contextmanager
def joined_rank(
    run: RunConfig,
    layouts: Sequence[ParallelLayout],
    channels: ChannelChoice = "auto",
    memory_bytes: int | None = None,
    members: Membership | None = None,
) -> Iterator[RankSetup]:
    """As `started_rank`, with only what processes need to meet.

    Args:
        memory_bytes: what one process may hold; None = its share of what there is.
        members: who trains, where others may be lost; None = all that the launcher started, to the end.

    Raises:
        RankLostError: with `members`, another rank is lost.
    """
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    threads = run.threads_per_process or max(1, usable_cores() // local_world)
    torch.set_num_threads(threads)
    if run.device == "cuda":
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        # Before anything asks CUDA for its devices.
        set_cuda_defaults(os.environ, deterministic=run.deterministic)
        if run.deterministic:
            use_deterministic_kernels()
    require_device(run.device, local_world)
    device = rank_device(run.device, int(os.environ["LOCAL_RANK"]))
    with _all_ranks(run.timeout_s) if members is None else members.groups(run.timeout_s):
        meshes = create_meshes(
            layouts,
            device,
            run.timeout_s,
            run.checkpoint_timeout_s,
            # Where a loss is no error nobody asks for signs.
            signs=_store_of_signs() if members is None else None,
            channels=channel_mode(channels, run.device, layouts),
            ranks_per_machine=local_world,
        )
        if device.type == "cuda" or len(layouts) > 1:
            warm_up(meshes)
        cap = memory_bytes or least_of_all(memory_for_rank(device, local_world), meshes.start)
        try:
            yield RankSetup(meshes=meshes, threads=threads, memory_cap_bytes=cap)
        except BaseException:
            if meshes.start.num_ranks == 1:  # there is nobody else, and this process may live on
                meshes.start.watch.close()
            raise
        # Only where all went well: after an error other ranks may never answer, and the launcher ends them.
        meshes.start.watch.close()
        dist.destroy_process_group()


def set_cuda_defaults(environment: MutableMapping[str, str], *, deterministic: bool = False) -> None:
    """What CUDA, its libraries and torch's allocator read when a process first uses its GPU; what a user has set stays.

    Queues to the device: eight by default, and streams that share one wait for each other. Packs of every step have
    other sizes, which an allocator of fixed segments answers with memory that fits nothing; growing segments do not.
    cuBLAS adds in one order if its workspace is always the same.
    """
    if deterministic:
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    if not any(name in environment for name in _ALLOCATOR_SETTINGS):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


@contextmanager
def _all_ranks(timeout_s: float) -> Iterator[None]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))
    yield


def run_coefficients(
    trainer: Trainer, cache: Path, threads: int, console: Console, max_document_tokens: int | None = None
) -> CostCoefficients:
    """The checkpoint's cost file after a resume (so that plans stay the same) where it covers the layout, else the
    configured one, else cached, else measured; for the configured ways in which keys and values travel and gradients
    are summed.

    With `train.recalibrate` always measured. What a switch of layout costs is measured at every start, if the costs do
    not say, or say it of another number of ranks (those before a loss, say), which share a machine in other parts.

    Args:
        max_document_tokens: no longer ones are timed; default: the configured longest.
    """
    found = _found_or_measured(trainer, cache, threads, console, max_document_tokens)
    if trainer.live is None or not trainer.live.shares_memory:
        found = msgspec.structs.replace(found, copies=None)  # those of a checkpoint, say
    elif found.copies is None or found.copies.num_ranks != trainer.mesh.num_ranks:
        found = msgspec.structs.replace(found, copies=trainer.live.measured_copies())
    config = trainer.config
    return msgspec.structs.replace(
        found,
        context_exchange=config.parallel.cp_exchange,
        overlap=_overlap(trainer, found.overlap),
        overlap_reduction=config.train.overlap_reduction,
        overlap_gather=config.train.overlap_gather,
        context_beside=None,
        tensor_beside=None,
    )


def _overlap(trainer: Trainer, known: OverlapCost | None) -> OverlapCost | None:
    """Return how collectives and compute slow each other: measured where costs do not say it, as those of a layout in
    which nothing was reduced; assumed on a GPU. Collective there."""
    train, meshes = trainer.config.train, trainer.meshes
    if known is not None or not meshes.sum_gradients or not (train.overlap_reduction or train.overlap_gather):
        return known
    return measured_overlap(meshes) or OverlapCost()


def _found_or_measured(
    trainer: Trainer, cache: Path, threads: int, console: Console, max_document_tokens: int | None
) -> CostCoefficients:
    mesh, configured = trainer.mesh, trainer.config.train.cost_file
    is_anew = trainer.config.train.recalibrate
    if trainer.coefficients is not None and not is_anew:
        lacks = missing_costs(trainer.coefficients, mesh.layout)
        if not lacks:
            return trainer.coefficients
        console.print(
            f"the costs in the checkpoint do not cover layout {mesh.layout.describe()} ({', '.join(lacks)}): costs of "
            "this layout are used from here on",
            soft_wrap=True,
        )
    name = device_name(mesh.device, threads)
    path = cached_path(cache, trainer.model, mesh.layout, name, threads, what_is_timed(trainer.config))
    found: list[CostCoefficients | None] = [None]
    if mesh.rank == 0:
        found[0] = read_coefficients(configured) if configured is not None else None if is_anew else read_cached(path)
    dist.broadcast_object_list(found, src=0, group=mesh.control)
    if found[0] is not None:
        if configured is not None:
            require_covered(found[0], trainer.model, mesh.layout, f"train.cost_file {configured}")
            for line in cost_file_warnings(found[0], configured, name):
                console.print(f"evenload: warning: {line}", soft_wrap=True, markup=False)
        return found[0]
    console.print("calibrating: timing this model's layers on this machine (seconds; cached for the next run)")
    longest = max_document_tokens or trainer.config.data.max_document_tokens
    most, demand = trainer.config.max_pack_tokens, computing_demand(threads)
    measured = calibrate(trainer.stages, trainer.model, mesh, longest, name, demand, most)
    if mesh.device.type == "cuda" and 2 * measured.largest_pack_tokens <= most:
        console.print(
            f"packs of up to {measured.largest_pack_tokens:,} tokens were timed, as time and memory allowed; the run's "
            f"may have {most:,}, whose seconds are extrapolated",
            soft_wrap=True,
        )
    if (found_noise := measured.coefficients.disturbance) is not None and found_noise.is_noisy:
        console.print(
            f"calibration was disturbed: {found_noise.describe()}. Predicted seconds may be too long. These "
            "costs are used for this run and not kept for the next; once the machine is quiet, train.recalibrate=true "
            "measures again",
            soft_wrap=True,
        )
    elif mesh.rank == 0:
        try:
            write_cached(path, measured.coefficients)
        except OSError as error:  # such as of a home that is no directory of the user's
            console.print(
                f"these costs are not kept for the next run: {path.parent} cannot be written ({error.strerror}); set "
                "HOME or XDG_CACHE_HOME",
                soft_wrap=True,
            )
    return measured.coefficients


def what_is_timed(config: TrainConfig) -> str:
    """What changes measured seconds beside model, layout and device: costs are kept for runs that have the same."""
    found = config.train.attention + (", fused norms" if config.train.fuses_norms else "")
    found += ", fused elementwise" if config.train.fuses_elementwise else ""
    if config.train.deterministic:
        found += ", deterministic"
    if config.train.device == "cuda":
        # Packs of 2, 4, 8, ... times as many tokens are timed up to these.
        pack, document = (1 << (n.bit_length() - 1) for n in (config.max_pack_tokens, config.data.max_document_tokens))
        found += f", packs of {pack} tokens, documents of {document}"
    return found


def computing_demand(threads: int) -> float:
    """Of the ranks on this machine: threads that compute for each core that they may use."""
    return threads * int(os.environ["LOCAL_WORLD_SIZE"]) / usable_cores()


def _store_of_signs() -> dist.Store:  # type: ignore[reportPrivateImportUsage]
    """A connection of its own to the store through which the ranks met."""
    host, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(host, port, is_master=False)  # type: ignore[reportPrivateImportUsage]
    return dist.PrefixStore("evenload", store)  # type: ignore[reportPrivateImportUsage]


def least_of_all(num_bytes: int, mesh: Mesh) -> int:
    """What the rank with least has: plans are for all ranks, and those of machines with less memory have to hold them,
    too. Collective."""
    return int(least_of_ranks(num_bytes, mesh))


def memory_for_rank(device: torch.device, local_world: int) -> int:
    """Bytes for one process: of its GPU, of the machine, or of the container where one is limited."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory * (1 - _FREE_DEVICE_SHARE))
    return process_memory_bytes(local_world)


def device_name(device: torch.device, threads: int) -> str:
    """What measured seconds are of: a GPU's name, or the processor's and how many threads a process has."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor_name()}, {threads} thread{'s' if threads > 1 else ''} a process"


def _processor_name() -> str:
    """The CPU's model name where the system tells it."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
