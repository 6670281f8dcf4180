"""What every process of a run does before its first step: refuse settings that do not go together (`require_runnable`),
join the others (`joined_rank`), and read or measure the costs (`run_coefficients`).

tests/support/matrix.py lists the pairs of settings that are refused; others are trained in tests/dist/test_matrix.py.
"""

import itertools
import os
import platform
import sys
import time
from collections.abc import Iterator, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path

import msgspec
import torch
import torch.distributed as dist
from rich.console import Console

from evenload.attention.backends import select_backend
from evenload.calibrate.calibrate import cached_path, calibrate, read_cached, write_cached
from evenload.calibrate.links import links_of_layouts, measured_overlap
from evenload.cli.options import print_lines, progress_bar
from evenload.cli.plan_inputs import cost_file_warnings
from evenload.config.planner import layouts_of, process_memory_bytes, require_optimizer
from evenload.config.sections import RunConfig, liger_refusal, uses_liger, validation_data
from evenload.config.tokenizer import require_tokenizer
from evenload.config.train_config import TrainConfig
from evenload.cost.coefficients import CostCoefficients, OverlapCost, read_coefficients
from evenload.cost.layer_counts import require_supported_layout, require_trees
from evenload.cost.validity import missing_costs, require_complete
from evenload.data.config import mixture_configs, shares_prefixes
from evenload.data.hub import local_path
from evenload.data.part_files import open_part
from evenload.errors import ConfigError
from evenload.planning.candidates import usable_cores
from evenload.planning.strategies.registry import require_layouts, require_trainable
from evenload.runtime.comm.mesh import Mesh, Meshes, create_meshes, most_of_ranks, share_of_first, warm_up
from evenload.runtime.device import rank_device, require_device, use_deterministic_kernels
from evenload.runtime.model.export_files import require_same_token_ids
from evenload.runtime.model.hf_model import require_layout, require_model
from evenload.runtime.model.model_config import load_config, model_spec, require_one_precision, router_aux_loss_coef
from evenload.runtime.replay.context_attention import require_no_window
from evenload.runtime.replay.tree_attention import NO_BALANCE_LOSS
from evenload.runtime.trainer import Trainer
from evenload.types.layout import ChannelChoice, ParallelLayout, channel_mode
from evenload.types.text import counted


def require_runnable(config: TrainConfig) -> ParallelLayout:
    """Refuse settings that do not go together, and return the layout in which the run starts."""
    config = config.with_found_kinds()
    hf_config = load_config(config.model.path)
    spec = model_spec(config)
    layouts = layouts_of(config, spec.num_layers)
    layout = layouts[0]
    for one in layouts:
        require_layout(hf_config, one)
        require_supported_layout(spec, one)
        require_one_precision(hf_config, config.model.dtype, one.pp)
    require_layouts(config.plan.strategy, layout, len(layouts))
    require_optimizer(config, spec, len(layouts))
    if config.plan.twin_bytes is not None and len(layouts) == 1:
        raise ConfigError(
            f"plan.twin_bytes is {config.plan.twin_bytes}, but the run takes one layout, {layout.describe()}, so "
            "nothing moves between layouts and nothing is shared; leave it out, or declare others in plan.layouts"
        )
    options = msgspec.structs.replace(config.plan.options, max_pack_tokens=config.max_pack_tokens)
    read = [config.data, *([validation_data(config.data, config.validation)] if config.validation else [])]
    has_trees = any(map(shares_prefixes, read))
    for one in layouts:
        require_trainable(config.plan.strategy, one, options, config.data.most_tree_tokens, has_trees=has_trees)
    if has_trees:
        require_trees(spec, layout)
        if router_aux_loss_coef(hf_config, config.model.router_aux_loss_coef):
            raise ConfigError(f"trees of shared prefixes: of {config.model.path} {NO_BALANCE_LOSS}")
    if config.train.cost_file is not None:
        file = config.train.cost_file
        require_complete(read_coefficients(file), spec, layout, f"train.cost_file {file}")
    if config.parallel.cp_exchange == "ring":
        require_no_window(max(spec.windows))
    require_same_token_ids(require_tokenizer(config.data, config.model.pretrained, spec.vocab_size))
    config.optimizer.rate(config.optimizer.warmup_steps, config.train.steps)  # finds and runs a user's function
    if config.train.kernels == "liger" and (why := liger_refusal(config.train.device, config.model.dtype)):
        raise ConfigError(f'train.kernels is "liger": {why}; or set train.kernels = "auto"')
    if config.train.device == "cpu":  # a GPU's kernels are checked on the GPU
        select_backend(config.train.attention, "cpu")
    for part in itertools.chain.from_iterable(map(mixture_configs, read)):
        open_part(part)
    weights = None if config.model.random_init else local_path(config.model.path, "model.path", "weights")
    require_model(hf_config, weights)
    return layout


@dataclass(frozen=True, eq=False, kw_only=True)
class RankSetup:
    """One process as a rank, with its threads, what it may hold, and a console that is quiet but on rank 0."""

    meshes: Meshes
    threads: int
    memory_cap_bytes: int
    console: Console

    @property
    def mesh(self) -> Mesh:
        """Of the layout in which the run starts."""
        return self.meshes.start

    @property
    def demand(self) -> float:
        """Threads that this machine's ranks compute with, for each core that they may use."""
        return self.threads * int(os.environ["LOCAL_WORLD_SIZE"]) / usable_cores()


def started_rank(config: TrainConfig, *layouts: ParallelLayout) -> AbstractContextManager[RankSetup]:
    """Join the other processes of this job, with groups for these layouts; the run starts in the first."""
    return joined_rank(config.train, layouts, config.parallel.channels, config.plan.memory_bytes)


@contextmanager
def joined_rank(
    run: RunConfig, layouts: Sequence[ParallelLayout], channels: ChannelChoice = "auto", memory_bytes: int | None = None
) -> Iterator[RankSetup]:
    """As `started_rank`; `memory_bytes` is what one process may hold, None = its share of what there is."""
    local_world = int(os.environ["LOCAL_WORLD_SIZE"])
    threads = run.threads_per_process or max(1, usable_cores() // local_world)
    torch.set_num_threads(threads)
    if run.device == "cuda":
        # The thread that plans lets the one that feeds a GPU go on; Python's own 5 ms are a thousand launches.
        sys.setswitchinterval(2e-4)
        # Before anything asks CUDA for its devices.
        set_cuda_defaults(os.environ, deterministic=run.deterministic)
        if run.deterministic:
            use_deterministic_kernels()
    require_device(run.device, local_world)
    device = rank_device(run.device, int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo", timeout=timedelta(seconds=run.timeout_s))
    # A connection of its own to the store through which the ranks met, for signs of life.
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)  # type: ignore[reportPrivateImportUsage]
    meshes = create_meshes(
        layouts,
        device,
        run.timeout_s,
        run.checkpoint_timeout_s,
        signs=dist.PrefixStore("evenload", store),  # type: ignore[reportPrivateImportUsage]
        channels=channel_mode(channels, run.device, layouts),
        ranks_per_machine=local_world,
    )
    if device.type == "cuda" or len(layouts) > 1:
        warm_up(meshes)
    # Plans are for all ranks, and those of machines with less memory have to hold them, too.
    cap_bytes = memory_bytes or int(-most_of_ranks(-memory_for_rank(device, local_world), meshes.start))
    console = Console(stderr=True, quiet=meshes.start.rank != 0, highlight=False)
    try:
        yield RankSetup(meshes=meshes, threads=threads, memory_cap_bytes=cap_bytes, console=console)
    except BaseException:
        if meshes.start.num_ranks == 1:  # there is nobody else, and this process may live on
            meshes.start.watch.close()
        raise
    # Only where all went well: after an error other ranks may never answer, and the launcher ends them.
    meshes.start.watch.close()
    dist.destroy_process_group()


def set_cuda_defaults(environment: MutableMapping[str, str], *, deterministic: bool = False) -> None:
    """Set what CUDA, its libraries and torch's allocator read at the first use of the GPU, unless the user has."""
    if deterministic:  # cuBLAS adds in one order if its workspace is always the same
        environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # Of eight queues to the device, the default, streams share some and wait for each other.
    environment.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # Packs have other sizes in every step, for which segments that cannot grow leave memory that fits nothing.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & set(environment):
        environment["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"


def run_coefficients(
    trainer: Trainer, cache: Path, setup: RankSetup, max_document_tokens: int | None = None
) -> CostCoefficients:
    """Return the checkpoint's costs after a resume (so that plans stay the same) where they cover the layout, else the
    configured cost file, else cached costs, else measured ones; with the run's choice of exchanges and overlaps.

    With `train.recalibrate` always measured. Links that only other layouts of the run use, what a switch of layout
    costs between so many ranks, and how collectives and compute slow each other (on a GPU assumed) are measured if the
    costs do not have them. No documents longer than `max_document_tokens` (default: the configured longest) are timed.
    Collective.
    """
    costs = _known_or_measured(trainer, cache, setup, max_document_tokens)
    copies = costs.copies
    if trainer.state.live is None or not (moved := trainer.state.live.moved).shared or moved.via_host:
        copies = None  # those of a checkpoint, say
    elif copies is None or copies.num_ranks != trainer.mesh.num_ranks:
        copies = trainer.state.live.measured_copies()
    run, overlap = trainer.config.train, costs.overlap
    if overlap is None and trainer.meshes.sum_gradients and (run.overlap_reduction or run.overlap_gather):
        overlap = measured_overlap(trainer.meshes) or OverlapCost()
    return msgspec.structs.replace(
        links_of_layouts(costs, trainer.meshes),
        copies=copies,
        context_exchange=trainer.config.parallel.cp_exchange,
        overlap=overlap,
        overlap_reduction=run.overlap_reduction,
        overlap_gather=run.overlap_gather,
    )


def _known_or_measured(
    trainer: Trainer, cache: Path, setup: RankSetup, max_document_tokens: int | None
) -> CostCoefficients:
    mesh, config, threads = trainer.mesh, trainer.config, setup.threads
    configured, say = config.train.cost_file, partial(print_lines, setup.console)
    if trainer.coefficients is not None and not config.train.recalibrate:
        missing = missing_costs(trainer.coefficients, mesh.layout)
        if not missing:
            return trainer.coefficients
        say(
            f"the costs in the checkpoint do not cover layout {mesh.layout.describe()} ({', '.join(missing)}): costs "
            "of this layout are used from here on"
        )
    name = device_name(mesh.device, threads)
    path = cached_path(cache, trainer.model, mesh.layout, name, threads, what_is_timed(config))
    known: CostCoefficients | None = None
    if mesh.rank == 0:
        if configured is not None:
            known = read_coefficients(configured)
        elif not config.train.recalibrate:
            known = read_cached(path)
    if (known := share_of_first(known, mesh)) is not None:
        if configured is not None:
            require_complete(known, trainer.model, mesh.layout, f"train.cost_file {configured}")
            say(*(f"evenload: warning: {warning}" for warning in cost_file_warnings(known, configured, name)))
        return known
    longest = max_document_tokens or config.data.max_document_tokens
    max_s, most = config.train.calibration_max_s, config.max_pack_tokens
    from_s, what = time.perf_counter(), f"at most about {max_s:g} s, train.calibration_max_s"
    say(f"calibrating: timing this model's layers on this machine ({what}; cached for the next run)")
    with progress_bar(setup.console) as move:
        move(0, None, f"calibrating, {what}")
        arguments = trainer.state.stages, trainer.model, mesh, longest, name, setup.demand, most, max_s
        measured, timed_tokens = calibrate(*arguments)
    if mesh.device.type == "cuda" and 2 * timed_tokens <= most:
        say(
            f"packs of up to {timed_tokens:,} tokens were timed, as time and memory allowed; the run's "
            f"may have {most:,}, whose seconds are extrapolated"
        )
    where, noise = measured.measured_on, measured.noise
    assert where is not None
    assert noise is not None
    cut = "; cut short: layers, packs or repeats were left out" if where.is_cut_short else ""
    found = f"{noise.describe()}; {time.perf_counter() - from_s:.0f} s{cut}"
    say(f"machine busy, calibration was disturbed: {found}" if noise.is_noisy else f"machine quiet: {found}")
    if noise.is_noisy:
        say(
            "Predicted seconds may be too long, so they carry no interval, and these costs are not kept for the next "
            "run; once the machine is quiet, train.recalibrate=true measures again"
        )
    elif mesh.rank == 0:
        try:
            write_cached(path, measured)
        except OSError as error:  # such as of a home that is no directory of the user's
            say(
                f"these costs are not kept for the next run: {path.parent} cannot be written ({error.strerror}); set "
                "HOME or XDG_CACHE_HOME"
            )
    return measured


def what_is_timed(config: TrainConfig) -> str:
    """Name what changes measured seconds besides model, layout and device: costs are kept for runs with the same."""
    name = config.train.attention + (", deterministic" if config.train.deterministic else "")
    if uses_liger(config.train, config.model.dtype):
        name += ", liger"
    if config.train.device == "cuda":
        # Packs of 2, 4, 8, ... times as many tokens are timed up to these.
        pack, document = (1 << (n.bit_length() - 1) for n in (config.max_pack_tokens, config.data.max_document_tokens))
        name += f", packs of {pack} tokens, documents of {document}"
    return name


def memory_for_rank(device: torch.device, local_world: int) -> int:
    """Return the bytes for one process: of its GPU, of the machine, or of the container where one is limited."""
    if device.type == "cuda":
        # The rest is for CUDA, NCCL's buffers and what the allocator cannot use in one piece.
        return int(torch.cuda.get_device_properties(device).total_memory * 0.9)
    return process_memory_bytes(local_world)


def device_name(device: torch.device, threads: int) -> str:
    """Name what measured seconds are of: a GPU, or the processor and how many threads a process has."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return f"{next(names, platform.processor() or platform.machine())}, {counted(threads, 'thread')} a process"
