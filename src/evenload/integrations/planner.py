"""Planners of whole micro-batches: `EnginePlanner` for an engine, and `make_planner` for a `PackedLoader`.

Under an engine `auto` does not search as for Evenload's runtime: every strategy that the engine can run plans the step,
`balanced` also with other numbers of micro-batches than it would take, and the fastest by the engine's price is kept.
Where ranks wait for each other at every micro-batch only `balanced` is tried: its search was ahead of all others in
every case of `benchmarks/micro_batches.py`. A plain loop is an engine too (`catalog.LOOP`). Memory is not limited, as
it depends on the engine's settings; `max_pack_tokens` bounds a micro-batch.
"""

import copy
import logging
import math
from collections.abc import Hashable
from pathlib import Path
from typing import Any

import msgspec

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import CostCoefficients, read_coefficients
from evenload.cost.validity import fill_from_cluster, in_measured_precision
from evenload.data.hub import model_from, model_from_config
from evenload.errors import ConfigError, DataError, InfeasiblePlanError
from evenload.integrations.catalog import BEST, EngineProfile, require_auto, require_heads, require_strategy, runnable
from evenload.integrations.price import EnginePrice, StepShape, engine_price
from evenload.planning.planner import Proposal, StepPlanner, StepRequest
from evenload.planning.problem import CHOOSE, PlanOptions
from evenload.planning.strategies.baselines import BALANCED
from evenload.planning.strategies.registry import strategy_named
from evenload.types.cluster import cluster_of
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import MODELS, ModelSpec

ENGINES_AUTO = "every global batch by the strategy that is fastest by this engine's price, of those that it can run"
"""Describes `auto` under an engine."""
MORE_MICRO_BATCHES = (1.25, 1.5, 2, 3)
"""Multiples of the micro-batches of a rank under `balanced` that `auto` also tries."""
ASSUMED_MODEL = "llama-7b"
"""The model that packs are balanced for until one is named: only its ratio of attention to linear work counts."""
PLANNING_ERRORS = (ConfigError, DataError, InfeasiblePlanError)
"""Raised by a strategy that does not apply, which must not hide the others."""

_log = logging.getLogger("evenload.loader")


class EnginePlanner(StepPlanner):
    """Plans steps that an engine trains, in a `shape` that the run fixes; else as `StepPlanner`. A `ConfigError` for a
    layout that the engine does not have; `require_heads` checks the model that is to be trained."""

    def __init__(
        self,
        profile: EngineProfile,
        model: ModelSpec,
        coefficients: CostCoefficients,
        layout: ParallelLayout,
        options: PlanOptions,
        shape: StepShape | None = None,
    ) -> None:
        require_strategy(profile, BEST, options, layout)
        # Replicas share nothing, activations are stored, the engine orders its pipeline; its context group shares all.
        changes: dict[str, object] = {"dp_merge": False, "policy": "replay", "schedule": CHOOSE}
        if profile.context_parallel != "none":
            changes["cp_sharding"] = "per_document"
        own = msgspec.structs.replace(options, **changes)
        waits = profile.waits_in(layout)
        super().__init__(model, coefficients, layout, None, own, host="unlimited", waits_at_each=waits)
        self.profile, self.shape, self.schedule = profile, shape or StepShape(), options.schedule
        self._made: dict[Hashable, Proposal] | None = None

    def remembering(self) -> "EnginePlanner":
        """Return a copy that keeps all plans and makes none twice; copies of it share them."""
        other = copy.copy(self)
        other._made = {}
        return other

    def at_count(self, count: int) -> "EnginePlanner":
        """Return a copy that fixes the number of micro-batches of every rank."""
        other = copy.copy(self)
        other.shape = msgspec.structs.replace(self.shape, micro_batches=count)
        return other

    def price(self, proposal: Proposal) -> EnginePrice:
        """Predict what the plan takes on the engine."""
        return engine_price(proposal.plan, self.profile, self.costs, self.shape, self.schedule)

    def answer(self, request: StepRequest) -> Proposal:
        """Plan as `propose`; the plan's own prediction stays that of Evenload's runtime."""
        require_strategy(self.profile, request.strategy, self.options, self.layout)
        if request.strategy != BEST:
            return self._proposed(self, request)
        require_auto(self.profile, self.options)
        return self._fastest(request)

    def _proposed(self, planner: StepPlanner, request: StepRequest) -> Proposal:
        """Propose a plan by `planner`, this one or one of other options; return the earlier one where there is one."""
        if self._made is None:
            return StepPlanner.answer(planner, request)
        # A strategy that defers nothing plans alike whatever waits and follows.
        delays = strategy_named(request.strategy).delays(planner.options)
        of_state = (request.state, request.is_last) if delays else request.state is None
        asked = request.strategy, request.step, request.documents, request.left_out
        key = planner.options.micro_batches, asked, of_state
        if key not in self._made:
            self._made[key] = StepPlanner.answer(planner, request)
        return self._made[key]

    def _fastest(self, request: StepRequest) -> Proposal:
        """Propose the plan that is fastest by the engine's price, the first of equals; it defers nothing."""
        priced: list[tuple[float, Proposal]] = []
        failed: dict[str, Exception] = {}
        names = runnable(self.profile, self.options, self.layout)[0]
        if self.waits_at_each and self.layout.cp == 1:
            names = (BALANCED.name,)  # Whole documents, and its search divides them for such engines.
        tries: list[tuple[StepPlanner, str]] = [(self, name) for name in names]
        # A step cannot choose a number that the user fixed or that holds for all steps.
        is_fixed = self.options.micro_batches is not None or self.profile.is_constant_in(self.layout)
        for planner, name in tries:  # which `balanced` adds to
            try:
                proposal = self._proposed(planner, request._replace(strategy=name, is_last=True))
                priced.append((self.price(proposal).step_time_s, proposal))
            except PLANNING_ERRORS as error:
                failed[name] = error
                continue
            if name != BALANCED.name or planner is not self or is_fixed:
                continue
            count = max(len(packs.forward) for packs in proposal.plan.pack_plans)
            for other in sorted(self._other_counts(count, request) - {count}):
                options = msgspec.structs.replace(self.options, micro_batches=other)
                tries.append((self.with_options(options), BALANCED.name))
        if not priced:
            raise failed[BALANCED.name]
        return min(priced, key=lambda one: one[0])[1]

    def _other_counts(self, count: int, request: StepRequest) -> set[int]:
        """Return numbers of micro-batches that `balanced` is to try too, having chosen `count`."""
        if not self.waits_at_each:
            more = {math.ceil(factor * count) for factor in MORE_MICRO_BATCHES}
            return {number for number in more if number * self.layout.dp <= len(request.documents)}
        # Its search knows no transfers that compute hides, whose price favours fewer.
        limit, num_tokens = self.options.max_pack_tokens, sum(document.num_tokens for document in request.documents)
        least = 1 if limit is None else -(-num_tokens // (limit * self.layout.dp))
        return {least, (least + count) // 2}


def make_planner(
    model: Any,
    costs: CostCoefficients | str | Path | None,
    options: PlanOptions,
    *,
    dp: int,
    cp: int = 1,
    engine: EngineProfile,
    shape: StepShape | None = None,
) -> EnginePlanner:
    """Return a planner of whole micro-batches on `dp` replicas of `cp` ranks that share every pack.

    Args:
        model: as `model_spec_of`; None = `ASSUMED_MODEL`, whose heads decide nothing.
        costs: measured coefficients (`cost.json`); None = an H100's data sheet, as are links that a file lacks.
        engine: that trains the steps; `catalog.LOOP` is a loop of which nothing is known.

    Raises a `ConfigError` for no model, a cost file of another one, or heads that the ranks of a group cannot share.
    """
    spec = model_spec_of(ASSUMED_MODEL if model is None else model)
    layout = even_layout(spec.num_layers, dp=dp, cp=cp)
    cluster = cluster_of("h100", layout.world_size)
    if isinstance(costs, str | Path):
        origin, costs = f"cost file {costs}", read_coefficients(costs)
        spec = in_measured_precision(spec, costs)
        costs, messages = fill_from_cluster(costs, spec, layout, cluster, origin)
        for message in messages:
            _log.info("%s", message)
    if costs is None:
        costs = analytic_coefficients(spec, cluster, layout)
    if model is not None:
        require_heads(engine, spec, layout)
    return EnginePlanner(engine, spec, costs, layout, options, shape)


def known_vocabulary(model: Any) -> int | None:
    """Return the ids of the caller's model; None without one, and for a built-in name, which only balances."""
    if model is None:
        return None
    spec = model_spec_of(model)
    return None if spec in MODELS.values() else spec.vocab_size


def model_spec_of(model: Any) -> ModelSpec:
    """Return what the cost model reads of a built-in name, a `config.json` or its directory, a `ModelSpec`, or a
    transformers model or configuration; a `ConfigError` for anything else."""
    if isinstance(model, ModelSpec):
        return model
    if isinstance(model, str | Path):
        return model_from(str(model))
    config = getattr(model, "config", model)
    if hasattr(config, "to_dict"):
        return model_from_config(config.to_dict(), config.to_dict().get("model_type") or type(model).__name__)
    kinds = f"a name such as '{ASSUMED_MODEL}', a config.json or its directory, a ModelSpec, a transformers model"
    raise ConfigError(f"model is a {type(model).__name__}; give {kinds}")
