"""The planner of a `PackedLoader`, and by which cost model it balances.

Balance needs the *ratio* of attention to linear work, which depends on the model's width above all; where nobody names
the model, it is `ASSUMED_MODEL` on H100s, and the loader says so.
"""

import logging
import math
from pathlib import Path
from typing import Any

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import CostCoefficients, read_coefficients
from evenload.cost.coverage import completed_from_cluster, in_measured_precision
from evenload.data.hub import model_from
from evenload.engines.engine_planner import EnginePlanner
from evenload.engines.profile import EngineProfile
from evenload.engines.projection import StepShape
from evenload.engines.refusals import require_heads
from evenload.errors import ConfigError
from evenload.plan.planner import StepPlanner
from evenload.plan.problem.options import PlanOptions
from evenload.types.cluster_catalog import DEVICES_PER_NODE, cluster_from
from evenload.types.hf_config import model_from_hf_config
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec
from evenload.types.model_catalog import MODELS

ASSUMED_MODEL = "llama-7b"
_log = logging.getLogger("evenload.loader")


def make_planner(
    model: Any,
    costs: CostCoefficients | str | Path | None,
    ranks: tuple[int, int],
    options: PlanOptions,
    engine: EngineProfile | None = None,
    shape: StepShape | None = None,
) -> StepPlanner:
    """A planner of whole micro-batches on so many replicas.

    Args:
        ranks: replicas, and ranks that share every pack of one.
        model: a built-in name, a `config.json` or its directory, a `ModelSpec`, or an object with a transformers
            configuration; None = nobody has named it: `ASSUMED_MODEL`, whose heads say nothing of whether ranks can
            share those of the model.
        costs: measured coefficients (`cost.json`) instead of a data sheet's. Links that a file lacks are an H100
            node's: they count in predicted step times, not in the balance.
        engine, shape: that trains the steps, and what the loader fixes of them; None = a loop of which nothing is
            known.

    Raises:
        ConfigError: not a model, or a cost file of another one; a model whose heads the engine cannot share among the
            ranks of a group.
    """
    spec = _model_spec(ASSUMED_MODEL if model is None else model)
    (dp, cp), world_size = ranks, math.prod(ranks)
    layout = even_layout(spec.num_layers, dp=dp, cp=cp)
    whole_nodes = -(-world_size // DEVICES_PER_NODE) * DEVICES_PER_NODE
    cluster = cluster_from(f"h100x{whole_nodes if world_size > DEVICES_PER_NODE else world_size}")
    if isinstance(costs, str | Path):
        origin, costs = f"cost file {costs}", read_coefficients(costs)
        spec = in_measured_precision(spec, costs)
        costs, notes = completed_from_cluster(costs, spec, layout, cluster, origin)
        for note in notes:
            _log.info("%s", note)
    if costs is None:
        costs = analytic_coefficients(spec, cluster, layout)
    if engine is not None:
        if model is not None:
            require_heads(engine, spec, layout)
        return EnginePlanner(engine, spec, costs, layout, options, shape)
    return StepPlanner(spec, costs, layout, None, options, host="unlimited")


def known_vocabulary(model: Any) -> int | None:
    """Ids of the caller's model; None without one, and for a built-in name: it may stand for one balanced alike."""
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
