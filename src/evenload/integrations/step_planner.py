"""The planner of a `PackedLoader`: which strategies a caller's own loop can run, and by which cost model they balance.

A caller's loop runs forward and backward of a whole micro-batch and knows documents only. So strategies that cut
documents are refused unless the caller says that its attention reads the keys of earlier slices. Balance needs the
*ratio* of attention to linear work, which depends on the model's width above all; where nobody names the model, it is
`ASSUMED_MODEL` on H100s, and the loader says so.
"""

import logging
from pathlib import Path
from typing import Any

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import CostCoefficients, read_coefficients
from evenload.cost.coverage import completed_from_cluster, in_measured_precision
from evenload.errors import ConfigError
from evenload.integrations.batch_formats import PREFIX_FORMATS, BatchFormat
from evenload.plan.options import PlanOptions
from evenload.plan.planner import StepPlanner
from evenload.plan.strategies import (
    DELAYING_STRATEGIES,
    LAYOUT_STRATEGIES,
    WHOLE_STRATEGIES,
    strategy_named,
)
from evenload.types.cluster_catalog import DEVICES_PER_NODE, cluster_from
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec, model_from_hf_config
from evenload.types.model_catalog import MODELS, model_from

ASSUMED_MODEL = "llama-7b"
_log = logging.getLogger("evenload.loader")


def check_strategy(strategy: str, format: BatchFormat, *, accept_slices: bool) -> None:
    """Refuse a strategy that the caller's loop cannot run.

    Raises:
        ConfigError: unknown; it cuts documents; it changes the layout.
    """
    strategy_named(strategy)
    if strategy in LAYOUT_STRATEGIES:
        raise ConfigError(f"strategy '{strategy}' changes the pipeline's layout; a loader alone has none to change")
    if strategy in WHOLE_STRATEGIES:
        return
    if not accept_slices:
        raise ConfigError(
            f"strategy '{strategy}' cuts documents: a micro-batch holds tokens whose keys and values are in an earlier "
            "one, and its backward passes come in another order, which a plain loop runs wrong without a word. Choose "
            f"one of {', '.join(WHOLE_STRATEGIES)}, train with 'evenload train', or say accept_slices=True if your "
            "loop keeps keys and values of earlier slices and follows step.plan"
        )
    if format not in PREFIX_FORMATS:
        raise ConfigError(
            f"strategy '{strategy}' cuts documents, and format '{format}' cannot say that a slice attends to more keys "
            f"than it has queries; use format {' or '.join(PREFIX_FORMATS)}"
        )


def may_delay(strategy: str, options: PlanOptions) -> bool:
    """The strategy may train documents in a later step than their batch's."""
    return strategy in DELAYING_STRATEGIES and (strategy == "wlb" or options.window > 1)


def make_planner(
    model: Any, costs: CostCoefficients | str | Path | None, world_size: int, options: PlanOptions
) -> StepPlanner:
    """A planner of whole micro-batches on `world_size` replicas.

    Args:
        model: a built-in name, a `config.json` or its directory, a `ModelSpec`, or an object with a transformers
            configuration.
        costs: measured coefficients (`cost.json`) instead of a data sheet's. Links that a file lacks are an H100
            node's: they count in predicted step times, not in the balance.

    Raises:
        ConfigError: not a model, or a cost file of another one.
    """
    spec = _model_spec(model)
    layout = even_layout(spec.num_layers, dp=world_size)
    devices = world_size
    if devices > DEVICES_PER_NODE:
        devices = -(-world_size // DEVICES_PER_NODE) * DEVICES_PER_NODE
    cluster = cluster_from(f"h100x{devices}")
    if isinstance(costs, str | Path):
        origin, costs = f"cost file {costs}", read_coefficients(costs)
        spec = in_measured_precision(spec, costs)
        costs, notes = completed_from_cluster(costs, spec, layout, cluster, origin)
        for note in notes:
            _log.info("%s", note)
    if costs is None:
        costs = analytic_coefficients(spec, cluster, layout)
    return StepPlanner(spec, costs, layout, None, options)


def known_vocabulary(model: Any) -> int | None:
    """Ids of the caller's model; None without a model, and for a built-in name, which may be another one that is
    balanced alike.

    Raises:
        ConfigError: not a model.
    """
    if model is None:
        return None
    spec = _model_spec(model)
    return None if spec in MODELS.values() else spec.vocab_size


def _model_spec(model: Any) -> ModelSpec:
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, str | Path):
        return model_from(str(model))
    config = getattr(model, "config", model)
    if hasattr(config, "to_dict"):
        return model_from_hf_config(config.to_dict(), config.to_dict().get("model_type") or type(model).__name__)
    raise ConfigError(
        f"model is a {type(model).__name__}; give a built-in name such as '{ASSUMED_MODEL}', a config.json or its "
        "directory, a ModelSpec, or a transformers model or configuration"
    )
