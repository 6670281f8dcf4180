"""Layouts to try for a model on a cluster, and the best of them by simulation."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from evenload.cost.analytic import analytic_coefficients
from evenload.cost.memory import static_bytes
from evenload.errors import ConfigError, EvenloadError
from evenload.plan.default_layout import usable_bytes
from evenload.plan.options import PlanOptions
from evenload.plan.planner import Proposal, StepPlanner
from evenload.types.cluster import ClusterSpec
from evenload.types.document import Document
from evenload.types.layout import ParallelLayout, even_layout
from evenload.types.model import ModelSpec

STATIC_SHARE = 0.8
"""A layout whose weights, gradients and optimizer state take more of a device leaves no room to train."""


class Tried(NamedTuple):
    """One layout under one strategy, the mean over steps."""

    layout: ParallelLayout
    step_s: float
    lower_bound_s: float
    proposal: Proposal
    planner: StepPlanner

    @property
    def fraction(self) -> float:
        """Of the lower bound."""
        return self.lower_bound_s / self.step_s


def layouts_of(
    model: ModelSpec, cluster: ClusterSpec, *, tp: Sequence[int], cp: Sequence[int], pp: Sequence[int]
) -> Iterator[ParallelLayout]:
    """Layouts over all devices whose static bytes leave room; dp takes the rest of the devices."""
    for tensor in tp:
        for context in cp:
            for depth in pp:
                inner = tensor * context * depth
                if cluster.num_devices % inner:
                    continue
                try:
                    layout = even_layout(
                        model.num_layers, dp=cluster.num_devices // inner, cp=context, pp=depth, tp=tensor
                    )
                    analytic_coefficients(model, cluster, layout)
                except ConfigError:
                    continue  # heads that do not divide, fewer layers than stages
                if static_bytes(model, layout).max() <= STATIC_SHARE * usable_bytes(cluster):
                    yield layout


def try_layouts(
    model: ModelSpec,
    cluster: ClusterSpec,
    layouts: Sequence[ParallelLayout],
    batch: tuple[Document, ...],
    strategy: str,
    options: PlanOptions,
) -> list[Tried]:
    """Those that fit memory, fastest first; layouts that the strategy refuses are left out."""
    lengths = np.array([document.num_tokens for document in batch], dtype=np.int64)
    found = []
    for layout in layouts:
        coefficients = analytic_coefficients(model, cluster, layout)
        planner = StepPlanner(model, coefficients, layout, usable_bytes(cluster), options)
        try:
            proposal = planner.propose(0, batch, strategy)
        except EvenloadError:
            continue
        if proposal.feasible:
            bound_s = planner.costs.lower_bound_seconds(lengths)
            found.append(Tried(layout, proposal.plan.predicted.step_time_s, bound_s, proposal, planner))
    return sorted(found, key=lambda tried: tried.step_s)
