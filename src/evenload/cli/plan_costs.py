"""What `evenload plan` costs with: a data sheet's numbers, or a cost file that was measured on this model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.coefficients import CostCoefficients, read_coefficients
from evenload.cost.coverage import completed_from_cluster, in_measured_precision, require_measured_on
from evenload.runtime.config.train_config import TrainConfig
from evenload.types.cluster import ClusterSpec
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


@dataclass(frozen=True)
class PlanCosts:
    """Costs of a model on a cluster, for any layout.

    Args:
        model: in the precision that was measured, where something was.
        measured: from a cost file; None = from the cluster's data sheet.
        origin: the cost file, for messages.
        context_exchange: how a run's keys and values of shared documents travel; None = as measured.
    """

    model: ModelSpec
    cluster: ClusterSpec
    measured: CostCoefficients | None = None
    origin: str = ""
    context_exchange: Literal["all_gather", "ring"] | None = None

    def of(self, layout: ParallelLayout) -> CostCoefficients:
        """Of one layout, which the cluster and the model must allow; what was measured must have the same tp."""
        from_sheet = analytic_coefficients(self.model, self.cluster, layout)  # also checks the layout
        found = from_sheet
        if self.measured is not None:
            found = completed_from_cluster(self.measured, self.model, layout, self.cluster, self.origin)[0]
        if self.context_exchange is None:
            return found
        return msgspec.structs.replace(found, context_exchange=self.context_exchange)

    def notes(self, layout: ParallelLayout) -> tuple[str, ...]:
        """What was not measured and comes from the cluster's data sheet, one sentence each."""
        if self.measured is None:
            return ()
        return completed_from_cluster(self.measured, self.model, layout, self.cluster, self.origin)[1]


def plan_costs(cost_file: Path | None, model: ModelSpec, cluster: ClusterSpec, run: TrainConfig | None) -> PlanCosts:
    """The costs that a plan uses.

    Args:
        cost_file: measured; its precision becomes the model's, because the command line names none, unless the model's
            is that of a run.

    Raises:
        ConfigError: the file cannot be read, does not say what it was measured on, or is of another model.
    """
    exchange = run.parallel.cp_exchange if run else None
    if cost_file is None:
        return PlanCosts(model, cluster, context_exchange=exchange)
    measured, origin = read_coefficients(cost_file), f"cost file {cost_file}"
    model = model if run else in_measured_precision(model, measured)
    require_measured_on(measured, model, origin)
    return PlanCosts(model, cluster, measured, origin, exchange)
