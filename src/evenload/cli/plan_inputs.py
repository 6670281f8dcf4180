"""`plan_inputs`: what `evenload plan` plans for, from its options and the training configuration they may start from.

Everything a user can get wrong without reading a document is refused here. An explicit option wins over the
configuration, which wins over the default.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from evenload.cli.layout_option import parse_layout
from evenload.cli.length_source import LengthSource
from evenload.cli.plan_arguments import DEFAULT_CONTEXT, DEFAULT_DOCUMENTS, PlanArguments
from evenload.cli.plan_costs import PlanCosts, plan_costs
from evenload.errors import ConfigError
from evenload.explore.default_layout import usable_bytes
from evenload.explore.sampled_batches import Overlong
from evenload.plan.problem.options import PlanOptions
from evenload.runtime.config.lora_config import adapter_parameters_per_layer
from evenload.runtime.config.plan_options import options_of_settings
from evenload.runtime.config.run_layout import BYTES_PER_ELEMENT, layout_of
from evenload.runtime.config.run_tokenizer import require_tokenizer
from evenload.runtime.config.train_config import TrainConfig
from evenload.types.cluster import ClusterSpec
from evenload.types.cluster_catalog import cluster_from
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec
from evenload.types.model_catalog import model_from


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


def plan_inputs(asked: PlanArguments, source: LengthSource) -> PlanInputs:
    """Put options, configuration and defaults together; refuses what `evenload train` would, too."""
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
    costs = plan_costs(cost, model, machines, run)
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
    asked: PlanArguments, run: TrainConfig | None, model: ModelSpec, machines: ClusterSpec
) -> tuple[ParallelLayout | None, bool]:
    if asked.layout:
        return parse_layout(asked.layout, model.num_layers, machines.num_devices), False
    if asked.search_layout or run is None:
        return None, False
    return layout_of(run, model.num_layers), True


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
