"""`plan_inputs`: what `evenload plan` plans for, on the cluster that is named or on this machine. All that a user can
get wrong without reading a document is refused. Options win over a configuration, which wins over the defaults."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from evenload.cli.options import parse_layout
from evenload.cli.plan_request import DEFAULT_CONTEXT, DEFAULT_DOCUMENTS, LengthSource, PlanRequest
from evenload.config.keys import options_of_settings
from evenload.config.planner import layers_move, layouts_of, machine_memory_bytes, process_memory_bytes
from evenload.config.sections import with_adapters
from evenload.config.tokenizer import require_tokenizer
from evenload.config.train_config import BYTES_PER_ELEMENT, TrainConfig, layout_of
from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import CostCoefficients, OverlapCost, read_coefficients
from evenload.cost.memory import HostMemory, host_memory, host_memory_of_node
from evenload.cost.validity import fill_from_cluster, in_measured_precision, require_measured_on
from evenload.data.hub import context_limit, model_from
from evenload.errors import ConfigError
from evenload.explore.batches import BatchRule
from evenload.explore.layout_search import LARGE_CLUSTER
from evenload.explore.prediction_interval import processor_of
from evenload.integrations.catalog import engine_named
from evenload.planning.problem import PlanOptions
from evenload.types.cluster import BUILT_IN, ClusterSpec, DeviceSpec, LinkSpec, cluster_from
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec
from evenload.types.text import format_percent


@dataclass(frozen=True, kw_only=True)
class PlanCosts:
    """Costs of a model on a cluster, for any layout.

    Args:
        measured: read from `cost_file`; None = costs come from the cluster's data sheet.
        run_choices: fields of costs that a run decides.
        copies_switches: a run changes its layout by copies in a machine's memory, which it measures at its start.
    """

    model: ModelSpec
    cluster: ClusterSpec
    measured: CostCoefficients | None = None
    cost_file: Path | None = None
    attention: str = "auto"
    run_choices: Mapping[str, object] = field(
        default_factory=lambda: {"overlap_reduction": True, "overlap_gather": True}
    )
    copies_switches: bool = False

    def of(self, layout: ParallelLayout) -> CostCoefficients:
        """Return the costs in a layout, which the cluster and the model must allow; measured ones must have its tp."""
        costs = analytic_coefficients(self.model, self.cluster, layout, self.attention)  # also checks the layout
        if self.measured is not None:
            costs, _ = self._completed(layout)
        return msgspec.structs.replace(costs, overlap=costs.overlap or self._assumed_overlap, **self.run_choices)

    def messages(self, layout: ParallelLayout) -> tuple[str, ...]:
        """Say what was measured, and what comes from the cluster's data sheet instead, one sentence each."""
        messages = []
        if (costs := self.measured) is not None:
            messages += [measured_message(costs), other_device_message(costs, self.cluster)]
            overlaps = self.run_choices["overlap_reduction"] or self.run_choices["overlap_gather"]
            if overlaps and costs.overlap is None and max(layout.data_sizes) > 1:
                assumed = "nothing is hidden" if self._assumed_overlap is None else "a GPU's is assumed"
                messages.append(f"how much collectives and compute slow each other was not measured; {assumed}")
            messages += self._completed(layout)[1]
        if self.copies_switches and (costs is None or costs.copies is None):
            messages.append(
                "what a change of the layout takes was not measured: it is priced as if links carried all that the run "
                "copies in the machine's memory; --cost RUN/checkpoints/step-.../cost.json has what a run measured"
            )
        return tuple(filter(None, messages))

    @property
    def _assumed_overlap(self) -> OverlapCost | None:
        """Where it was not measured: on a CPU, whose cores move the bytes, nothing is hidden."""
        is_of_cpu = self.measured is not None and processor_of(self.measured.device) == "cpu"
        return None if is_of_cpu else OverlapCost()

    def _completed(self, layout: ParallelLayout) -> tuple[CostCoefficients, tuple[str, ...]]:
        assert self.measured is not None
        return fill_from_cluster(self.measured, self.model, layout, self.cluster, f"cost file {self.cost_file}")


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What is planned for.

    Args:
        layout: None = the best of a few, or of a search.
        run_layouts: that a run may take, the one in which it starts, `layout`, first; () = `layout` is no run's, and
            layers of its stages are balanced by cost.
        host: what a node offers to offloaded activations.
        layers_move: the run's layouts may have any layers in their stages.
        context_from: the context's origin where nobody gave it, such as "the model's limit"; else "".
    """

    model_name: str
    cluster_name: str
    costs: PlanCosts
    layout: ParallelLayout | None
    run_layouts: tuple[ParallelLayout, ...]
    batches: BatchRule
    options: PlanOptions
    host: HostMemory
    context_from: str = ""
    layers_move: bool = False

    def within(self, longest: int) -> "PlanInputs":
        """Return the inputs for documents of at most so many tokens, which are the context where nobody gave one."""
        limit, options = self.batches.context, self.options
        if not self.context_from or longest > limit:
            return self
        if options.max_pack_tokens == limit:
            options = msgspec.structs.replace(options, max_pack_tokens=longest)
        batches = replace(self.batches, context=longest)
        return replace(self, batches=batches, options=options, context_from="the longest document")

    @property
    def cluster(self) -> ClusterSpec:
        return self.costs.cluster

    @property
    def memory_cap_bytes(self) -> int:
        """What a device offers."""
        return self.cluster.device.usable_bytes


def plan_inputs(request: PlanRequest, source: LengthSource) -> PlanInputs:
    """Put options, configuration and defaults together; refuses what `evenload train` would, too."""
    _require_compatible(request)
    run = source.run
    model_name, model = _model(request.model, run)
    cost_file = _cost_file(run, request.cost, is_here=request.cluster is None)
    if request.cluster is not None:
        cluster = cluster_from(request.cluster)
    else:
        cluster = _this_machine(run, cost_file, request.layout, model)
    is_large = cluster.num_devices > LARGE_CLUSTER
    if is_large and request.search_layout and (request.worst or request.emit_plan or request.trace):
        raise ConfigError(
            f"--search-layout judges clusters of more than {LARGE_CLUSTER} devices on a part of a step, "
            "--worst, --emit-plan and --trace are of whole steps; give --layout for these"
        )
    host = host_memory(cluster)
    if run is not None:
        require_tokenizer(source.data, run.model.pretrained, model.vocab_size)
        if run.plan.memory_bytes:
            device = msgspec.structs.replace(
                cluster.device, memory_bytes=run.plan.memory_bytes, reserved_bytes=0, fragmentation_share=0.0
            )
            cluster = msgspec.structs.replace(cluster, device=device)
        if run.plan.host_memory_bytes is not None:
            host = host_memory_of_node(cluster.devices_per_node, run.plan.host_memory_bytes)
    costs = _costs(cost_file, model, cluster, run)
    layout, run_layouts = _layout(request, run, costs.model, cluster)
    if layout is not None:
        costs.of(layout)  # refuses what the cluster or the model cannot have
    documents, tokens, context = request.documents, request.tokens_of("tokens"), request.tokens_of("context")
    if documents is None and tokens is None:
        documents, tokens = (run.data.batch_documents, run.data.batch_tokens) if run else (DEFAULT_DOCUMENTS, None)
    # Without a run longer documents are cut off, as a first answer is worth more than an error; how much is said.
    context_from, overlong = "", run.data.overlong if run else "truncate"
    if context is None and run is None:
        known = context_limit(model_name)
        context_from = "the model's limit" if known else "the model's limit is not known"
        context = known or DEFAULT_CONTEXT
    longest = run.data.max_document_tokens if run and context is None else context
    assert longest is not None
    return PlanInputs(
        model_name=model_name,
        cluster_name=request.cluster or THIS_MACHINE,
        costs=costs,
        layout=layout,
        run_layouts=run_layouts,
        batches=BatchRule(
            num_documents=documents, num_tokens=tokens, context=longest, overlong=request.overlong or overlong
        ),
        options=_options(request, run, context, costs.model),
        host=host,
        context_from=context_from,
        layers_move=run is not None and layers_move(run.plan),
    )


def _require_compatible(request: PlanRequest) -> None:
    if request.search_layout and request.layout:
        raise ConfigError(f"--search-layout looks for the layout, --layout {request.layout} gives it; leave one out")
    if request.search_seconds is not None:
        if not request.search_layout:
            raise ConfigError("--search-seconds limits --search-layout, which is not given; give both, or none")
        if not request.search_seconds > 0:
            raise ConfigError(f"--search-seconds is {request.search_seconds:g}, must be above 0")
    if request.search_layout and request.engine:
        raise ConfigError(
            f"--search-layout ranks layouts for Evenload's own runtime, --engine {request.engine} runs others; give "
            "--layout, or leave one of both out"
        )
    if request.engine:
        engine_named(request.engine)
    if request.documents is not None and request.tokens is not None:
        raise ConfigError(f"--documents {request.documents} and --tokens {request.tokens} exclude each other; give one")


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


def _layout(
    request: PlanRequest, run: TrainConfig | None, model: ModelSpec, cluster: ClusterSpec
) -> tuple[ParallelLayout | None, tuple[ParallelLayout, ...]]:
    """Return the layout, if it is known, and those of the run where it is the run's own."""
    if request.layout:
        return parse_layout(request.layout, model.num_layers, cluster.num_devices), ()
    if request.search_layout:
        return None, ()
    if run is not None:
        layouts = layouts_of(run, model.num_layers)
        return layouts[0], layouts
    if request.engine and not engine_named(request.engine).schedules:
        return even_layout(model.num_layers, dp=cluster.num_devices), ()
    return None, ()


def _options(request: PlanRequest, run: TrainConfig | None, context: int | None, model: ModelSpec) -> PlanOptions:
    # A run's configuration was read with the settings.
    options = run.plan.options if run else options_of_settings(request.settings)
    most = run.max_pack_tokens if run and context is None else context
    if any(setting.partition("=")[0].strip() == "max_pack_tokens" for setting in request.settings):
        most = options.max_pack_tokens
    # Strategies share documents where replicas can: the default of `evenload train`, too.
    dp_merge = not model.state_functions if options.dp_merge is None else options.dp_merge
    return msgspec.structs.replace(options, max_pack_tokens=most, dp_merge=dp_merge)


def _costs(cost_file: Path | None, model: ModelSpec, cluster: ClusterSpec, run: TrainConfig | None) -> PlanCosts:
    """Return the costs; without a run the model gets the precision of the measured file, as nothing else names one."""
    measured = None if cost_file is None else read_coefficients(cost_file)
    if run is None:
        model = model if measured is None else in_measured_precision(model, measured)
        # Attention runs in a GPU's kernels if these compute in the model's precision.
        model = msgspec.structs.replace(model, attention_workspace=model.bytes_per_element == 2)
    if measured is not None:
        require_measured_on(measured, model, f"cost file {cost_file}")
    costs = PlanCosts(model=model, cluster=cluster, measured=measured, cost_file=cost_file)
    if run is None:
        return costs
    choices = {name: getattr(run.train, name) for name in ("overlap_reduction", "overlap_gather")}
    choices["context_exchange"] = run.parallel.cp_exchange
    may_copy = run.train.device == "cpu" and run.plan.twin_bytes != 0
    copies_switches = may_copy and len(layouts_of(run, model.num_layers)) > 1
    return replace(costs, attention=run.train.attention, run_choices=choices, copies_switches=copies_switches)


THIS_MACHINE = "this machine"
_DRIVER = Path("/proc/driver/nvidia/gpus")
# Patterns of the whole name that the driver has for a GPU. The built-in ones are SXM cards; PCIe and NVL cards of the
# same name compute more slowly and have other links, so no pattern may match a part of a name.
_BUILT_IN_GPUS = (
    (r"(NVIDIA )?H100 (80GB HBM3|SXM5?( 80GB)?)", "h100"),
    (r"(NVIDIA )?H200( SXM5?)?", "h200"),
    (r"(NVIDIA )?B200( SXM6?)?", "b200"),
    (r"(NVIDIA )?A100-SXM4?-80GB", "a100"),
    (r"(NVIDIA )?A100-SXM4?-40GB", "a100-40"),
)


def _cost_file(run: TrainConfig | None, given: Path | None, *, is_here: bool) -> Path | None:
    """Return the cost file that was given, else the run's; on this machine also what the run left in its folder."""
    if given is not None or run is None:
        return given
    if run.train.cost_file:
        return Path(run.train.cost_file)
    left = Path(run.train.output_dir) / "cost.json"
    return left if is_here and left.is_file() else None


def _this_machine(run: TrainConfig | None, cost_file: Path | None, layout: str | None, model: ModelSpec) -> ClusterSpec:
    """Describe this machine as a cluster of one node. GPUs are known by what NVIDIA's driver says in /proc, and must be
    of a built-in kind. Processes on the CPU (of the run, or of the requested `layout`) have no data sheet: seconds and
    links are those of a cost file measured here, and memory is each one's share of the machine's."""
    if run is None:
        raise ConfigError(
            "--cluster is missing; name one such as h100x8, or give the config.toml of a run on this machine"
        )
    if run.train.device == "cuda":
        if (gpus := gpus_here()) is None:
            raise ConfigError(
                f"--cluster is missing, the run computes on GPUs, and NVIDIA's driver tells of none here ({_DRIVER}); "
                "name the cluster that it will run on"
            )
        return gpus
    if cost_file is None:
        raise ConfigError(
            "--cluster is missing, the run computes on the CPU, and how fast this one is was not measured; run "
            "evenload profile or the run itself (cost.json in its output_dir) and give --cost, or name a --cluster"
        )
    processes = layout_of(run.parallel, model.num_layers).world_size
    if layout:
        processes = parse_layout(layout, model.num_layers, processes).world_size
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
        name=THIS_MACHINE,
        num_nodes=1,
        devices_per_node=processes,
        device=device,
        intra_node=link,
        inter_node=link,
        host_memory_bytes=machine_memory_bytes(),
    )


def gpus_here() -> ClusterSpec | None:
    """Return this machine's GPUs by what their driver says; None where there are none, `ConfigError` for other ones
    than the built-in."""
    texts = (file.read_text(encoding="utf-8") for file in sorted(_DRIVER.glob("*/information")))
    models = [re.search(r"^Model:\s*(.+?)\s*$", text, flags=re.MULTILINE) for text in texts]
    names = [match[1] if match else "a GPU without a name" for match in models]
    if not names:
        return None
    kinds = {next((kind for pattern, kind in _BUILT_IN_GPUS if re.fullmatch(pattern, name)), None) for name in names}
    if len(kinds) > 1 or None in kinds:
        raise ConfigError(
            f"--cluster is missing, and this machine has {', '.join(sorted(set(names)))}, of which not all are one of "
            f"the built-in {', '.join(BUILT_IN)} (all SXM); describe it in a TOML file (docs/plan.md) for --cluster"
        )
    (kind,) = kinds
    return cluster_from(f"{kind}x{len(names)}")


def _link(costs: CostCoefficients, cost_file: Path, processes: int) -> LinkSpec:
    """Return the link between processes, as far as it was measured; one process alone uses none."""
    link = costs.intra_node or costs.link_or_none("p2p") or costs.link_or_none("reduce")
    if link is None and processes > 1:
        raise ConfigError(
            f"cost file {cost_file} knows no link, and the layout has {processes} processes; measure it with evenload "
            "profile --layout and that layout, or name a --cluster"
        )
    return link or LinkSpec(bandwidth_bytes_per_s=float("inf"), latency_s=0.0)


def measured_message(costs: CostCoefficients) -> str:
    """Say what costs were measured on, how, and how far off they were."""
    measured, profile = costs.measured_on, costs.profile
    assert measured is not None, "read by `cost.validity.require_measured_on`"
    sizes = ",".join(f"{axis}={getattr(measured, axis)}" for axis in ("dp", "cp", "pp", "tp"))
    precision = next(name for name, size in BYTES_PER_ELEMENT.items() if size == measured.model.bytes_per_element)
    message = f"measured on {costs.device}, model {measured.model.name} in {precision}, layout {sizes}"
    if profile is None:
        return f"{message}, in seconds at the start of a run (evenload profile takes minutes, and states its errors)"
    errors = " and ".join(
        f"{format_percent(error.median)} (median) {format_percent(error.p90)} (90 % of them) {direction}"
        for direction, error in (("forward", profile.forward), ("backward", profile.backward))
    )
    message += (
        f", on {profile.date[:10]} by evenload {profile.versions.get('evenload', '?')}; {profile.forward.packs} packs "
        f"x {profile.passes} passes in {profile.seconds / 60:.1f} min, {profile.outliers:,} of {profile.timings:,} "
        f"timings far off; packs that the fit had not seen were off by {errors}"
    )
    if costs.is_changed:
        message += "; CHANGED after it was measured, so these errors may no longer hold"
    return message


def other_device_message(costs: CostCoefficients, cluster: ClusterSpec) -> str:
    """Say that seconds are of another device than the cluster's, as far as names tell; "" where they agree."""
    # "H100" of "H100-80GB", which its driver calls "NVIDIA H100 80GB HBM3".
    if re.split(r"[-\s]", cluster.device.name.lower())[0] in costs.device.lower():
        return ""
    return (
        f"the seconds were measured on {costs.device} and are taken as they are; cluster {cluster.name} has "
        f"{cluster.device.name}, so if that is another device, step times are not of it"
    )


def cost_file_warnings(costs: CostCoefficients, file: str, device_name: str) -> list[str]:
    """Warn of what may make predictions of a run wrong though its `train.cost_file` is of its model and layout."""
    warnings = {
        f"costs measured on {costs.device} (train.cost_file {file}), this is {device_name}: predicted seconds are of "
        "the former": costs.device != device_name,
        f"train.cost_file {file} was changed after evenload profile had measured it: its errors may no longer "
        "hold": costs.is_changed,
    }
    return [text for text, is_so in warnings.items() if is_so]
