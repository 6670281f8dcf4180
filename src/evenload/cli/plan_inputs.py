"""`plan_inputs`: what `evenload plan` plans for, from its options and the training configuration they may start from,
on the cluster that is named or on this machine.

Everything a user can get wrong without reading a document is refused here. An explicit option wins over the
configuration, which wins over the default.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from evenload.cli.options import parse_layout
from evenload.cli.plan_arguments import DEFAULT_CONTEXT, DEFAULT_DOCUMENTS, LengthSource, PlanArguments
from evenload.config.keys import options_of_settings
from evenload.config.layouts import layouts_of
from evenload.config.planner import machine_memory_bytes, process_memory_bytes
from evenload.config.sections import with_adapters
from evenload.config.tokenizer import require_tokenizer
from evenload.config.train_config import BYTES_PER_ELEMENT, TrainConfig, layout_of
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import CostCoefficients, OverlapCost, read_coefficients
from evenload.cost.host_memory import HostMemory, host_memory, host_memory_of_node
from evenload.cost.validity import (
    completed_from_cluster,
    in_measured_precision,
    require_measured_on,
)
from evenload.data.hub import model_from
from evenload.errors import ConfigError
from evenload.explore.batches import BatchRule
from evenload.explore.layout_search import LARGE_CLUSTER
from evenload.explore.prediction_interval import processor_of
from evenload.integrations.catalog import engine_named
from evenload.plan.problem import PlanOptions
from evenload.report.units import format_percent
from evenload.types.cluster import BUILT_IN, ClusterSpec, DeviceSpec, LinkSpec, cluster_from
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec

_UNMEASURED_SWITCHES = (
    "what a change of the layout takes was not measured: it is priced as if links carried all that moves; the run "
    "copies it in the machine's memory and measures that at its start; --cost RUN/checkpoints/step-.../cost.json has "
    "what a run measured"
)


@dataclass(frozen=True)
class PlanCosts:
    """Costs of a model on a cluster, for any layout.

    Args:
        model: in the precision that was measured, where something was.
        measured: from a cost file; None = from the cluster's data sheet.
        origin: the cost file, for messages.
        context_exchange: how a run's keys and values of shared documents travel; None = as measured.
        overlap_reduction: a run reduces gradients beside packs; overlap_gather: it gathers updated weights beside those
            of the next step.
        attention: backend of a run.
        reads_twins: layouts of a run change by copies in a machine's memory, which the run measures at its start.
    """

    model: ModelSpec
    cluster: ClusterSpec
    measured: CostCoefficients | None = None
    origin: str = ""
    context_exchange: Literal["all_gather", "ring"] | None = None
    overlap_reduction: bool = True
    overlap_gather: bool = True
    attention: str = "auto"
    reads_twins: bool = False

    def of(self, layout: ParallelLayout) -> CostCoefficients:
        """Of one layout, which the cluster and the model must allow; what was measured must have the same tp."""
        found = analytic_coefficients(self.model, self.cluster, layout, self.attention)  # also checks the layout
        if self.measured is not None:
            found = completed_from_cluster(self.measured, self.model, layout, self.cluster, self.origin)[0]
        return msgspec.structs.replace(
            found,
            overlap=found.overlap or self._assumed_overlap,
            overlap_reduction=self.overlap_reduction,
            overlap_gather=self.overlap_gather,
            context_exchange=self.context_exchange or found.context_exchange,
        )

    def notes(self, layout: ParallelLayout) -> tuple[str, ...]:
        """What was measured, and what was not and comes from the cluster's data sheet, one sentence each."""
        unmeasured = () if not self.reads_twins or self._has_copies else (_UNMEASURED_SWITCHES,)
        if self.measured is None:
            return unmeasured
        described = [measured_line(self.measured), other_device_line(self.measured, self.cluster)]
        is_wanted = self.overlap_reduction or self.overlap_gather
        if is_wanted and self.measured.overlap is None and max(layout.data_sizes) > 1:
            taken = "nothing is hidden" if self._assumed_overlap is None else "a GPU's is assumed"
            described.append(f"how much collectives and compute slow each other was not measured; {taken}")
        return (*filter(None, described), *self._completions(layout), *unmeasured)

    @property
    def _assumed_overlap(self) -> OverlapCost | None:
        """Taken where it was not measured: on a CPU, whose cores move the bytes, that nothing hides."""
        return None if self._is_of_cpu else OverlapCost()

    @property
    def _is_of_cpu(self) -> bool:
        return self.measured is not None and processor_of(self.measured.device) == "cpu"

    @property
    def _has_copies(self) -> bool:
        return self.measured is not None and self.measured.copies is not None

    def _completions(self, layout: ParallelLayout) -> tuple[str, ...]:
        assert self.measured is not None
        return completed_from_cluster(self.measured, self.model, layout, self.cluster, self.origin)[1]


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What is planned for.

    Args:
        model_name, cluster_name, cost_name: as the user gave them.
        layout: None = the default one, or a search.
        keeps_stages: the layout is that of a run, layers of stages included; else they are balanced by cost.
        layouts: that a run may take, the one in which it starts first; None = that alone, or the layout is another.
        batches: how a global batch is drawn from the lengths.
        memory_cap_bytes: what a device offers.
        host: what a node offers to offloaded activations.
    """

    model_name: str
    cluster_name: str
    costs: PlanCosts
    machines: ClusterSpec
    layout: ParallelLayout | None
    keeps_stages: bool
    layouts: tuple[ParallelLayout, ...] | None
    batches: BatchRule
    options: PlanOptions
    cost_name: str
    memory_cap_bytes: int
    host: HostMemory


def plan_inputs(asked: PlanArguments, source: LengthSource) -> PlanInputs:
    """Put options, configuration and defaults together; refuses what `evenload train` would, too."""
    _require_sense(asked)
    run = source.run
    model_name, model = _model(asked.model, run)
    cost = cost_file_of(run, asked.cost, is_here=asked.cluster is None)
    if asked.cluster is not None:
        machines = cluster_from(asked.cluster)
    else:
        machines = this_machine(run, cost, _processes(asked, run, model))
    whole = asked.worst or asked.emit_plan or asked.trace
    if asked.search_layout and machines.num_devices > LARGE_CLUSTER and whole:
        raise ConfigError(
            f"--search-layout judges clusters of more than {LARGE_CLUSTER} devices on a part of a step, "
            "--worst, --emit-plan and --trace are of whole steps; give --layout for these"
        )
    if run is not None:
        random_init = run.model.random_init
        require_tokenizer(source.data, model_path=run.model.path, random_init=random_init, vocab_size=model.vocab_size)
    costs = _costs(cost, model, machines, run)
    layout, keeps_stages = _layout(asked, run, costs.model, machines)
    if layout is not None:
        costs.of(layout)  # refuses what the cluster or the model cannot have
    documents, tokens = asked.documents, asked.num_tokens
    if documents is None and tokens is None:
        documents, tokens = (run.data.batch_documents, run.data.batch_tokens) if run else (DEFAULT_DOCUMENTS, None)
    context = run.data.max_document_tokens if run else DEFAULT_CONTEXT
    context = context if asked.context_tokens is None else asked.context_tokens
    return PlanInputs(
        model_name=model_name,
        cluster_name=asked.cluster or NAME,
        costs=costs,
        machines=machines,
        layout=layout,
        keeps_stages=keeps_stages,
        layouts=_layouts(run, costs.model) if run and keeps_stages else None,
        batches=BatchRule(
            num_documents=documents,
            num_tokens=tokens,
            context=context,
            overlong=asked.overlong or (run.data.overlong if run else "error"),
        ),
        options=_options(asked, run),
        cost_name=str(cost) if cost else "analytic",
        memory_cap_bytes=(run.plan.memory_bytes if run else None) or machines.device.usable_bytes,
        host=_host(run, machines),
    )


def _require_sense(asked: PlanArguments) -> None:
    """Refuse options that exclude each other."""
    if asked.search_layout and asked.layout:
        raise ConfigError(f"--search-layout looks for the layout, --layout {asked.layout} gives it; leave one out")
    if asked.search_seconds is not None:
        if not asked.search_layout:
            raise ConfigError("--search-seconds limits --search-layout, which is not given; give both, or none")
        if not asked.search_seconds > 0:
            raise ConfigError(f"--search-seconds is {asked.search_seconds:g}, must be above 0")
    if asked.search_layout and asked.engine:
        raise ConfigError(
            f"--search-layout ranks layouts for Evenload's own runtime, --engine {asked.engine} runs others; give "
            "--layout, or leave one of both out"
        )
    if asked.engine:
        engine_named(asked.engine)
    if asked.documents is not None and asked.tokens is not None:
        raise ConfigError(f"--documents {asked.documents} and --tokens {asked.tokens} exclude each other; give one")


def _processes(asked: PlanArguments, run: TrainConfig | None, model: ModelSpec) -> int:
    """Of the run on this machine, in its layout or the one that was asked for."""
    if run is None:
        return 1
    own = layout_of(run.parallel, model.num_layers).world_size
    return parse_layout(asked.layout, model.num_layers, own).world_size if asked.layout else own


def _host(run: TrainConfig | None, machines: ClusterSpec) -> HostMemory:
    """Of a node of the cluster, or as much as the run says that one has."""
    if run is None or run.plan.host_memory_bytes is None:
        return host_memory(machines)
    return host_memory_of_node(machines.devices_per_node, run.plan.host_memory_bytes)


def _model(name: str | None, run: TrainConfig | None) -> tuple[str, ModelSpec]:
    if run is None:
        if name is None:
            raise ConfigError(
                "--model is missing; give a built-in name such as llama-7b, or a Hugging Face config.json"
            )
        return name, model_from(name)
    name = name or run.model.path
    model = msgspec.structs.replace(model_from(name), bytes_per_element=BYTES_PER_ELEMENT[run.model.dtype])
    return name, with_adapters(run.with_run_memory(model), run.model.lora)


def _in_kernels(model: ModelSpec) -> ModelSpec:
    """Where no run says otherwise, attention runs in a GPU's kernels if these compute in the model's precision."""
    return msgspec.structs.replace(model, attention_workspace=model.bytes_per_element == 2)


def _layout(
    asked: PlanArguments, run: TrainConfig | None, model: ModelSpec, machines: ClusterSpec
) -> tuple[ParallelLayout | None, bool]:
    if asked.layout:
        return parse_layout(asked.layout, model.num_layers, machines.num_devices), False
    if asked.search_layout or run is None:
        return None, False
    return layout_of(run.parallel, model.num_layers), True


def _layouts(run: TrainConfig, model: ModelSpec) -> tuple[ParallelLayout, ...] | None:
    may_take = layouts_of(run, model.num_layers)
    return may_take if len(may_take) > 1 else None


def _options(asked: PlanArguments, run: TrainConfig | None) -> PlanOptions:
    # A run's configuration was read with the settings.
    options = run.plan.options if run else options_of_settings(asked.settings)
    whole = run.max_pack_tokens if run else DEFAULT_CONTEXT
    whole = whole if asked.context_tokens is None else asked.context_tokens
    if any(setting.partition("=")[0].strip() == "max_pack_tokens" for setting in asked.settings):
        whole = options.max_pack_tokens
    # Strategies share documents where replicas can: the default of `evenload train`, too.
    dp_merge = True if options.dp_merge is None else options.dp_merge
    return msgspec.structs.replace(options, max_pack_tokens=whole, dp_merge=dp_merge)


def _costs(cost_file: Path | None, model: ModelSpec, cluster: ClusterSpec, run: TrainConfig | None) -> PlanCosts:
    """With a measured file its precision becomes the model's, because the command line names none, unless the model's
    is that of a run."""
    of_run: dict[str, Any] = {}
    if run is not None:
        reads_twins = run.train.device == "cpu" and run.plan.twin_bytes != 0 and _layouts(run, model) is not None
        of_run = {
            "context_exchange": run.parallel.cp_exchange,
            "overlap_reduction": run.train.overlap_reduction,
            "overlap_gather": run.train.overlap_gather,
            "reads_twins": reads_twins,
        }
    if cost_file is None:
        model = model if run else _in_kernels(model)
        return PlanCosts(model, cluster, attention=run.train.attention if run else "auto", **of_run)
    measured, origin = read_coefficients(cost_file), f"cost file {cost_file}"
    model = model if run else _in_kernels(in_measured_precision(model, measured))
    require_measured_on(measured, model, origin)
    return PlanCosts(model, cluster, measured, origin, **of_run)


# `this_machine`: what `evenload plan config.toml` plans for where no cluster is named: the machine that it runs on.
#
# GPUs are asked for by what NVIDIA's driver says of them in /proc, without torch, and must be of a built-in kind.
# Processes on the CPU have no data sheet: their seconds and links are those of a cost file, which `evenload profile`
# or a run leaves, their memory is each one's share of the machine's, as in `evenload train`.

NAME = "this machine"
_DRIVER = Path("/proc/driver/nvidia/gpus")
# By all that the driver calls a GPU. The built-in ones are SXM cards; PCIe and NVL cards of the same name compute more
# slowly and have other links, so no pattern may be met by a part of a name.
_BUILT_IN_GPUS = (
    (r"(NVIDIA )?H100 (80GB HBM3|SXM5?( 80GB)?)", "h100"),
    (r"(NVIDIA )?H200( SXM5?)?", "h200"),
    (r"(NVIDIA )?B200( SXM6?)?", "b200"),
    (r"(NVIDIA )?A100-SXM4?-80GB", "a100"),
    (r"(NVIDIA )?A100-SXM4?-40GB", "a100-40"),
)


def cost_file_of(run: TrainConfig | None, asked: Path | None, *, is_here: bool) -> Path | None:
    """The cost file that was asked for, else the run's; on this machine also what the run left in its folder."""
    if asked is not None:
        return asked
    if run is None:
        return None
    if run.train.cost_file:
        return Path(run.train.cost_file)
    left = Path(run.train.output_dir) / "cost.json"
    return left if is_here and left.is_file() else None


def this_machine(run: TrainConfig | None, cost_file: Path | None, processes: int) -> ClusterSpec:
    """The machine as a cluster of one node.

    Args:
        cost_file: of seconds measured here; `processes`: of the layout.

    Raises:
        ConfigError: no run's configuration says on which devices, its GPUs are not built in, or nothing measured says
            how fast its CPU is.
    """
    if run is None:
        raise ConfigError(
            "--cluster is missing; name one such as h100x8, or give the config.toml of a run on this machine"
        )
    if run.train.device == "cuda":
        return _gpus()
    if cost_file is None:
        raise ConfigError(
            "--cluster is missing, the run computes on the CPU, and how fast this one is was not measured; run "
            "evenload profile or the run itself, which leaves cost.json in its output_dir, and give --cost, or name a "
            "--cluster"
        )
    costs = read_coefficients(cost_file)
    device = DeviceSpec(
        name=costs.device,
        peak_flops_per_s=costs.peak_flops_per_s,
        memory_bytes=process_memory_bytes(processes),
        fragmentation_share=0.0,
        host_link=costs.host_link,
    )
    link = _link(costs, cost_file, processes)
    return ClusterSpec(
        name=NAME,
        num_nodes=1,
        devices_per_node=processes,
        device=device,
        intra_node=link,
        inter_node=link,
        host_memory_bytes=machine_memory_bytes(),
    )


def _gpus() -> ClusterSpec:
    names = [_model_name(file) for file in sorted(_DRIVER.glob("*/information"))]
    if not names:
        raise ConfigError(
            f"--cluster is missing, the run computes on GPUs, and NVIDIA's driver tells of none here ({_DRIVER}); name "
            "the cluster that it will run on"
        )
    kinds = {next((kind for pattern, kind in _BUILT_IN_GPUS if re.fullmatch(pattern, name)), None) for name in names}
    if len(kinds) > 1 or None in kinds:
        raise ConfigError(
            f"--cluster is missing, and this machine has {', '.join(sorted(set(names)))}, of which not all are one of "
            f"the built-in {', '.join(BUILT_IN)}, all SXM (PCIe and NVL cards have other speeds and links); describe "
            "the machine in a TOML file (docs/guide.md) and give it as --cluster"
        )
    (kind,) = kinds
    return cluster_from(f"{kind}x{len(names)}")


def _model_name(file: Path) -> str:
    found = re.search(r"^Model:\s*(.+?)\s*$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return found[1] if found else "a GPU without a name"


def _link(costs: CostCoefficients, cost_file: Path, processes: int) -> LinkSpec:
    """Between processes, as far as it was measured; one process alone uses none."""
    if costs.intra_node is not None:
        return costs.intra_node
    for kind in ("p2p", "reduce"):
        if (bandwidth := getattr(costs, f"{kind}_bandwidth_bytes_per_s")) is not None:
            return LinkSpec(bandwidth_bytes_per_s=bandwidth, latency_s=getattr(costs, f"{kind}_latency_s"))
    if processes > 1:
        raise ConfigError(
            f"cost file {cost_file} knows no link, and the layout has {processes} processes; measure it with evenload "
            "profile --layout and that layout, or name a --cluster"
        )
    return LinkSpec(bandwidth_bytes_per_s=float("inf"), latency_s=0.0)


_PRECISIONS = {2: "bfloat16", 4: "float32", 8: "float64"}


def measured_line(costs: CostCoefficients) -> str:
    """Of costs that say what they were measured on."""
    measured, profile = costs.measured_on, costs.profile
    assert measured is not None, "read by `cost.validity.require_measured_on`"
    sizes = ",".join(f"{axis}={getattr(measured, axis)}" for axis in ("dp", "cp", "pp", "tp"))
    precision = _PRECISIONS[measured.model.bytes_per_element]
    what = f"measured on {costs.device}, model {measured.model.name} in {precision}, layout {sizes}"
    if profile is None:
        return f"{what}, in seconds at the start of a run (evenload profile takes minutes and says how far it is off)"
    parts = [
        f"{what}, on {profile.date[:10]} by evenload {profile.versions.get('evenload', '?')}",
        f"{profile.forward.packs} packs x {profile.passes} passes in {profile.seconds / 60:.1f} min, "
        f"{profile.outliers:,} of {profile.timings:,} timings far off",
        "packs that the fit had not seen were off by "
        + " and ".join(
            f"{format_percent(error.median)} (median) {format_percent(error.p90)} (90 % of them) {direction}"
            for direction, error in (("forward", profile.forward), ("backward", profile.backward))
        ),
    ]
    if costs.is_changed:
        parts.append("CHANGED after it was measured, so these errors may no longer hold")
    return "; ".join(parts)


def other_device_line(costs: CostCoefficients, cluster: ClusterSpec) -> str:
    """That seconds are of another device than the cluster's, as far as names tell; "" where they agree."""
    # "H100" of "H100-80GB", which its driver calls "NVIDIA H100 80GB HBM3".
    if re.split(r"[-\s]", cluster.device.name.lower())[0] in costs.device.lower():
        return ""
    return (
        f"the seconds were measured on {costs.device} and are taken as they are; cluster {cluster.name} has "
        f"{cluster.device.name}, so if that is another device, step times are not of it"
    )


def cost_file_warnings(costs: CostCoefficients, file: str, device_name: str) -> list[str]:
    """What may make predictions of a run wrong though its `train.cost_file` is of its model and layout."""
    lines = []
    if costs.device != device_name:
        lines.append(
            f"costs measured on {costs.device} (train.cost_file {file}), this is {device_name}: predicted seconds are "
            "of the former"
        )
    if costs.is_changed:
        lines.append(
            f"train.cost_file {file} was changed after evenload profile had measured it: its errors may no longer hold"
        )
    return lines
