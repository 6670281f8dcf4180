"""Packs of a `Setting`, cut by the core (`native/trials.cpp`); `tests/reference/cuts.py` cuts the same in Python.

Three ways to cut, each by work, forward and backward seconds of the slowest stage (`types.work`):

asymmetric  SlimPack §4.1: long documents are slimmed into slices, short ones packed whole, so that every pack carries
            the same work; forward and backward packs by two calls with their own curves. All work lies on one line,
            documents longest first; a pack ends where the line reaches its target, at the boundary nearest to it:
            before a document, after it, or at a cut, found by bisection. Backward takes each document from its end.
            SlimPack states a MILP; in a fixed order this fill is exact up to the alignment. O(n + packs log length).
symmetric   backward packs are the forward packs, slices reversed inside documents. A document of several targets
            gives packs of one slice each; rests and short documents go longest first into the others. A pack with a
            slice that its document goes on after holds nothing else, so no document waits for the middle of another
            (a chain), as it does under sequential filling. O(n log n).
whole       documents as they are, longest first (LPT).

Then the first forward and the last backward pack are halved as often as `Setting.taper` says: the fill of a pipeline
costs (P - 1) forwards of the first pack, its drain (P - 1) backwards of the last.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.layer_counts import RECOMPUTE
from evenload.plan.problem.step_problem import StepProblem
from evenload.plan.search.trial_space import Setting, Trial, trial_rows
from evenload.types.columns import SliceColumns
from evenload.types.work import WorkCurve

ALIGN_FROM_TILES = 16
"""Cut at whole attention tiles where the shortest slices hold at least this many: a cut then moves by at most
half a tile, 1/32 of the slice, which is what the incomplete tile would have cost."""
NO_TOKEN_LIMIT = 2**63 - 1


@dataclass(frozen=True)
class CutRules:
    """What all cuts of a step have in common.

    Args:
        forward, backward: work on the slowest stage.
        tile: rows of an attention block.
    """

    forward: WorkCurve
    backward: WorkCurve
    tile: int
    min_slice_tokens: int
    max_pack_tokens: int | None

    def native_curves(self) -> tuple[tuple, tuple]:
        """Both curves as the core takes them."""
        forward, backward = (
            (curve.linear_s, curve.attention_s, curve.slice_s) for curve in (self.forward, self.backward)
        )
        return forward, backward


def cut_rules(problem: StepProblem) -> CutRules:
    """Of a step; backward is balanced as if all tokens recomputed alike: a curve knows no documents."""
    share = 0.0
    if problem.policy is not None and len(problem.num_tokens):
        share = float(problem.num_tokens[problem.policy == RECOMPUTE].sum() / problem.num_tokens.sum())
    return CutRules(
        problem.costs.forward_work(),
        problem.costs.backward_work(recomputed_share=share),
        problem.costs.coefficients.attention_tile,
        problem.options.min_slice_tokens,
        problem.options.max_pack_tokens,
    )


def trial_packs(
    problem: StepProblem, rules: CutRules, num_tokens: NDArray[np.int64], setting: Setting, ranks: int
) -> tuple[SliceColumns, SliceColumns] | None:
    """Forward and backward packs of at least one document, every slice shared by `ranks`; None where the token limit
    rules the setting out."""
    found = _native.cut_packs(
        problem.costs.native,
        num_tokens,
        trial_rows([Trial(setting)])[0],
        *rules.native_curves(),
        rules.min_slice_tokens,
        NO_TOKEN_LIMIT if rules.max_pack_tokens is None else rules.max_pack_tokens,
        ALIGN_FROM_TILES,
    )
    return None if found is None else (_columns(found[0], ranks), _columns(found[1], ranks))


def _columns(cut: tuple[NDArray[Any], ...], ranks: int) -> SliceColumns:
    doc, start, stop, pack_offset = cut
    pad_to, cp = np.zeros(len(pack_offset) - 1, np.int64), np.full(len(doc), ranks, np.int64)
    return SliceColumns(doc, start, stop, pack_offset, pad_to, cp)
