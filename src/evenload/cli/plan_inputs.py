"""`plan_inputs`: what `evenload plan` plans for, from its options and the training configuration they may start from.

Everything a user can get wrong without reading a document is refused here. An explicit option wins over the
configuration, which wins over the default.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from evenload.cli.layout_option import parse_layout
from evenload.cli.length_source import LengthSource
from evenload.cli.plan_costs import PlanCosts, plan_costs
from evenload.errors import ConfigError
from evenload.plan.default_layout import usable_bytes
from evenload.plan.global_batch import Overlong
from evenload.plan.options import PlanOptions, PolicyOption
from evenload.runtime.config import TrainConfig
from evenload.runtime.lora_config import adapter_parameters_per_layer
from evenload.runtime.run_layout import BYTES_PER_ELEMENT, layout_of
from evenload.runtime.run_tokenizer import require_tokenizer
from evenload.types.cluster import ClusterSpec
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.model_catalog import model_from

DEFAULT_DOCUMENTS = 512
"""Documents of a global batch where nothing says its size."""
DEFAULT_CONTEXT = 131_072
"""Tokens of the longest document trained whole, where nothing says so."""


@dataclass(frozen=True, kw_only=True)
class AskedPlan:
    """Options of the command line; None = not given."""

    model: str | None
    cluster: str
    layout: str | None
    search_layout: bool
    documents: int | None
    tokens: int | None
    context: int | None
    overlong: Overlong | None
    policy: PolicyOption | None
    dp_merge: bool | None
    window: int | None
    max_delay_steps: int | None
    cost: Path | None


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What is planned for.

    Args:
        model_name, cluster_name, cost_name: as the user gave them.
        layout: None = the default one, or a search.
        keeps_stages: the layout is that of a run, layers of stages included; else they are balanced by cost.
        documents, tokens: size of a global batch, one of them.
        memory_cap_bytes: what a device offers.
    """

    model_name: str
    cluster_name: str
    costs: PlanCosts
    machines: ClusterSpec
    layout: ParallelLayout | None
    keeps_stages: bool
    documents: int | None
    tokens: int | None
    context: int
    overlong: Overlong
    options: PlanOptions
    cost_name: str
    memory_cap_bytes: int


def plan_inputs(asked: AskedPlan, source: LengthSource) -> PlanInputs:
    """Put options, configuration and defaults together.

    Raises:
        ConfigError: options that exclude each other, no model, an unknown model, cluster or layout, or a run that
            `evenload train` would refuse for its tokeniser.
    """
    if asked.search_layout and asked.layout:
        raise ConfigError(f"--search-layout looks for the layout, --layout {asked.layout} gives it; leave one out")
    if asked.documents is not None and asked.tokens is not None:
        raise ConfigError(f"--documents {asked.documents} and --tokens {asked.tokens} exclude each other; give one")
    run, machines = source.run, cluster_from(asked.cluster)
    model_name, model = _model(asked.model, run)
    if run is not None:
        random_init = run.model.random_init
        require_tokenizer(source.data, model_path=run.model.path, random_init=random_init, vocab_size=model.vocab_size)
    cost = asked.cost or (Path(run.train.cost_file) if run and run.train.cost_file else None)
    costs = plan_costs(cost, model, machines, in_own_precision=run is not None)
    if run is not None:
        costs = costs.exchanging(run.parallel.cp_exchange)
    layout, keeps_stages = _layout(asked, run, costs.model, machines)
    if layout is not None:
        costs.of(layout)  # refuses what the cluster or the model cannot have
    documents, tokens = asked.documents, asked.tokens
    if documents is None and tokens is None:
        documents, tokens = (run.data.batch_documents, run.data.batch_tokens) if run else (DEFAULT_DOCUMENTS, None)
    context = run.data.max_document_tokens if run else DEFAULT_CONTEXT
    context = context if asked.context is None else asked.context
    return PlanInputs(
        model_name=model_name,
        cluster_name=asked.cluster,
        costs=costs,
        machines=machines,
        layout=layout,
        keeps_stages=keeps_stages,
        documents=documents,
        tokens=tokens,
        context=context,
        overlong=asked.overlong or (run.data.overlong if run else "error"),
        options=_options(asked, run),
        cost_name=str(cost) if cost else "analytic",
        memory_cap_bytes=(run.plan.memory_bytes if run else None) or usable_bytes(machines),
    )


def _model(name: str | None, run: TrainConfig | None) -> tuple[str, ModelSpec]:
    if run is None:
        if name is None:
            raise ConfigError(
                "--model is missing; give a built-in name such as llama-7b, or a Hugging Face config.json"
            )
        return name, model_from(name)
    name = name or run.model.path
    model = msgspec.structs.replace(model_from(name), bytes_per_element=BYTES_PER_ELEMENT[run.model.dtype])
    if run.model.lora is None:
        return name, model
    adapters = adapter_parameters_per_layer(model, run.model.lora)
    return name, msgspec.structs.replace(model, adapter_parameters_per_layer=adapters)


def _layout(
    asked: AskedPlan, run: TrainConfig | None, model: ModelSpec, machines: ClusterSpec
) -> tuple[ParallelLayout | None, bool]:
    if asked.layout:
        return parse_layout(asked.layout, model.num_layers, machines.num_devices), False
    if asked.search_layout or run is None:
        return None, False
    return layout_of(run, model.num_layers), True


def _options(asked: AskedPlan, run: TrainConfig | None) -> PlanOptions:
    base = run.plan.options if run else PlanOptions()
    # Strategies share documents where replicas can: the default of `evenload train`, too.
    changes = {"dp_merge": True if base.dp_merge is None else base.dp_merge}
    given = {name: getattr(asked, name) for name in ("policy", "dp_merge", "window", "max_delay_steps")}
    changes |= {name: value for name, value in given.items() if value is not None}
    whole = asked.context if asked.context is not None else run.max_pack_tokens if run else DEFAULT_CONTEXT
    return msgspec.structs.replace(base, max_pack_tokens=whole, **changes)
