"""What `evenload profile` runs in other processes: the checks in one, then the measurement in one per rank."""

import functools
from importlib.metadata import version
from pathlib import Path
from typing import Literal

import msgspec
import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from transformers import PretrainedConfig

from evenload.attention.backends import select_backend
from evenload.calibrate.profile import ProfileTask, partial_path, profile
from evenload.cli.options import parse_layout
from evenload.cli.worker_setup import RankSetup, device_name, joined_rank
from evenload.config.sections import RunConfig
from evenload.config.train_config import BYTES_PER_ELEMENT
from evenload.cost.coefficients import CostCoefficients
from evenload.data.hub import model_from
from evenload.errors import ConfigError
from evenload.runtime.device import require_device, resident_bytes
from evenload.runtime.model.configured import config_from, spec_of, with_few_layers
from evenload.runtime.model.hf_model import build_rank_models, build_stage_model
from evenload.runtime.model.supported import attention_soft_cap
from evenload.runtime.model.tensor_weights import require_tensor_parallel
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.types.base import Frozen
from evenload.types.cluster import DeviceKind
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec
from evenload.types.text import format_bytes

# More layers of a stage than these say nothing new; fewer fit caches that a model's do not.
_MOST_LAYERS = 4
# Of a process's memory that weights and gradients of the layers may take.
_WEIGHT_SHARE = 0.35


class ProfileOptions(Frozen):
    """What the command line says.

    Args:
        layout: as `--layout` takes it; "" = one process.
        longest: tokens of the longest document that is tried.
    """

    model: str
    layout: str
    device: DeviceKind
    dtype: Literal["float32", "bfloat16", "float64"]
    attention: str
    minutes: float
    longest: int
    threads: int | None
    output: str


def checked_profile(options: ProfileOptions, processes_here: int | None) -> ParallelLayout:
    """The layout of a profile whose options go together.

    Args:
        processes_here: of this machine; None = all of the layout.

    Raises:
        ConfigError, UnsupportedModelError: no such model, one that is not trained, or a layout that it or this machine
            cannot have.
    """
    config, model = _model(options)
    layout = _layout(options, model)
    require_tensor_parallel(config, layout.tp)
    require_device(options.device, layout.world_size if processes_here is None else processes_here)
    if options.device == "cpu":  # a GPU's kernels are asked on the GPU
        select_backend(options.attention, "cpu", attention_soft_cap(config))
    return layout


def run_profile_worker(options: ProfileOptions, answer: Path | None) -> int:
    """One rank of a profile; rank 0 leaves the coefficients in a file. It ends at once when it is asked to stop; passes
    that are done are kept."""
    config, model = _model(options)
    layout = _layout(options, model)
    run = RunConfig(output_dir="", device=options.device, threads_per_process=options.threads)
    with joined_rank(run, (layout,)) as setup:
        console = Console(stderr=True, quiet=setup.mesh.rank != 0, highlight=False)
        found = _profiled(options, config, model, setup, console)
        if setup.mesh.rank == 0 and answer is not None:
            answer.write_bytes(msgspec.json.encode(found))
    return 0


def _profiled(
    options: ProfileOptions, config: PretrainedConfig, model: ModelSpec, setup: RankSetup, console: Console
) -> CostCoefficients:
    mesh, device = setup.mesh, setup.mesh.device
    dtype: torch.dtype = getattr(torch, options.dtype)
    before_bytes = resident_bytes() or 0
    few = _few_layers(config, model, setup)
    timed = spec_of(few, model.name, model.bytes_per_element)
    stages_of_all = mesh.layout.num_stages
    sizes = {axis: getattr(mesh.layout, axis) for axis in ("dp", "cp", "pp", "tp")}
    layout = even_layout(timed.num_layers, virtual=stages_of_all // mesh.layout.pp, **sizes)
    build = functools.partial(build_stage_model, dtype=dtype, device=device, weights=None, seed=0, tp_rank=mesh.tp_rank)
    models = build_rank_models(few, layout, mesh.pp_rank, build)
    buffers = flatten_units(tuple(models.values()), mesh.data_size)
    backend = select_backend(
        options.attention, device.type, attention_soft_cap(few), dtype=dtype, head_dim=model.head_dim
    )
    stages = {index: PipelineStage(part, backend, mesh.tensor) for index, part in models.items()}
    static_bytes = sum(buffer.values.nbytes + buffer.grads.nbytes for buffer in buffers)
    task = ProfileTask(
        model=model,
        timed=timed,
        layers=len(stages[min(stages)].model.layers),
        device_name=device_name(device, setup.threads),
        dtype=options.dtype,
        longest=options.longest,
        budget_s=options.minutes * 60,
        free_bytes=max(0, setup.memory_cap_bytes - static_bytes),
        before_bytes=before_bytes,
        static_bytes=static_bytes,
        demand=setup.demand,
        partial=partial_path(Path(options.output)),
        versions={"evenload": version("evenload"), "torch": version("torch")},
    )
    console.print(
        f"profiling {task.describe(mesh, stages[min(stages)])}: at most about {options.minutes:g} min (--minutes)",
        soft_wrap=True,
        markup=False,
    )
    columns = (TextColumn("passes"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("passes", total=None)
        return profile(
            stages,
            task,
            mesh,
            say=lambda text: console.print(text, soft_wrap=True, markup=False),
            on_pass=lambda done, total: progress.update(bar, completed=done, total=total),
        )


def _few_layers(config: PretrainedConfig, model: ModelSpec, setup: RankSetup) -> PretrainedConfig:
    """A configuration with as many layers as memory allows, up to four a stage.

    Raises:
        ConfigError: not even one layer of each kind fits.
    """
    tp, stages = setup.mesh.layout.tp, setup.mesh.layout.num_stages
    per_rank = stages // setup.mesh.layout.pp
    element_bytes = model.bytes_per_element + max(4, model.bytes_per_element)
    layer_bytes = per_rank * element_bytes * model.stored_parameters_per_layer // tp
    # The first stage has the embedding, the last the head; on one rank both, or one that is tied.
    outer = (2 if stages == per_rank and not model.tied_embeddings else 1) * model.embedding_parameters
    outer_bytes = element_bytes * outer // tp
    room = int(_WEIGHT_SHARE * setup.memory_cap_bytes) - outer_bytes
    needed = len(set(model.windows))
    if room < needed * layer_bytes:
        raise ConfigError(
            f"{needed} layer{'s' if needed > 1 else ''} of {model.name} a stage and its embedding take "
            f"{format_bytes(needed * layer_bytes + outer_bytes)} with their gradients, and a process may use "
            f"{format_bytes(int(_WEIGHT_SHARE * setup.memory_cap_bytes))} for them; split matrices with --layout "
            "tp=..., or take a machine with more memory"
        )
    return with_few_layers(config, model.windows, stages, min(_MOST_LAYERS, room // layer_bytes))


def _model(options: ProfileOptions) -> tuple[PretrainedConfig, ModelSpec]:
    config = config_from(options.model)
    return config, spec_of(config, model_from(options.model).name, BYTES_PER_ELEMENT[options.dtype])


def _layout(options: ProfileOptions, model: ModelSpec) -> ParallelLayout:
    """As `--layout` of `evenload plan`, but dp is 1 where it is not named: there is no cluster to fill."""
    axes = {part.partition("=")[0].strip() for part in options.layout.split(",")}
    text = options.layout if "dp" in axes else ",".join(filter(None, ("dp=1", options.layout)))
    return parse_layout(text, model.num_layers, 1)
