"""Packs of a `Setting`: the Python twin of `native/trials.cpp`'s cuts, and the call of the core.

Both give the same slices, to the token. Costs: O(n log n) a cut.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from evenload import _native
from evenload.cost.activation import RECOMPUTE
from evenload.errors import ConfigError
from evenload.plan.bin_packing import longest_first
from evenload.plan.chain_free import chain_free_columns, work_below
from evenload.plan.pack_halving import halve_pack
from evenload.plan.partition import partition_by_work
from evenload.plan.problem import StepProblem
from evenload.plan.trial_space import Setting, Trial, trial_rows
from evenload.types.columns import SliceColumns, whole_document_columns
from evenload.types.work import WorkCurve, sum_in_order

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
    problem: StepProblem, rules: CutRules, num_tokens: NDArray[np.int64], setting: Setting, ranks: int | None
) -> tuple[SliceColumns, SliceColumns] | None:
    """Forward and backward packs; None where the token limit rules the setting out.

    Args:
        num_tokens: int64[k], at least one.
        ranks: that share every slice; None = the layout's.
    """
    if problem.options.backend == "native":
        found = _native.cut_packs(
            problem.costs.native,
            num_tokens,
            trial_rows([Trial(setting)])[0],
            *rules.native_curves(),
            rules.min_slice_tokens,
            NO_TOKEN_LIMIT if rules.max_pack_tokens is None else rules.max_pack_tokens,
            ALIGN_FROM_TILES,
        )
        packs = None if found is None else (_columns(*found[0]), _columns(*found[1]))
    else:
        packs = _tapered(rules, num_tokens, setting)
    if packs is None or ranks is None:
        return packs
    forward, backward = (replace(columns, cp=np.full(columns.num_slices, ranks, np.int64)) for columns in packs)
    return forward, backward


def _columns(
    doc: NDArray[np.int32], start: NDArray[np.int64], stop: NDArray[np.int64], pack_offset: NDArray[np.int64]
) -> SliceColumns:
    return SliceColumns(doc, start, stop, pack_offset, np.zeros(len(pack_offset) - 1, np.int64))


def _tapered(
    rules: CutRules, num_tokens: NDArray[np.int64], setting: Setting
) -> tuple[SliceColumns, SliceColumns] | None:
    packs = _packs(rules, num_tokens, setting)
    if packs is None or setting.taper == (0, 0):
        return packs
    forward, backward = packs
    first, last = setting.taper
    may_cut, low = setting.cut != "whole", rules.min_slice_tokens
    for _ in range(first):
        halved = halve_pack(forward, 0, rules.forward, backward=False, min_slice_tokens=low, may_cut=may_cut)
        forward = halved or forward
    for _ in range(last):
        at = backward.num_packs - 1
        halved = halve_pack(backward, at, rules.backward, backward=True, min_slice_tokens=low, may_cut=may_cut)
        backward = halved or backward
    return forward, backward


def _packs(
    rules: CutRules, num_tokens: NDArray[np.int64], setting: Setting
) -> tuple[SliceColumns, SliceColumns] | None:
    curves = [
        replace(curve, linear_s=setting.token_weight * curve.linear_s) for curve in (rules.forward, rules.backward)
    ]
    forward, backward = curves
    if setting.cut == "whole":
        return _whole(rules, num_tokens, setting.num_packs, (forward, backward))
    limits = {
        "min_slice_tokens": rules.min_slice_tokens,
        "max_pack_tokens": rules.max_pack_tokens,
        "backend": "python",
    }
    if setting.cut == "symmetric":
        align = _align(rules, num_tokens, setting.num_packs, forward, backward)
        return chain_free_columns(num_tokens, (forward, backward), setting.num_packs, align=align, **limits)
    order = np.argsort(-work_below((forward,), num_tokens), kind="stable").astype(np.int32)
    parts = []
    for curve, last_first in ((forward, False), (backward, True)):
        align = _align(rules, num_tokens, setting.num_packs, curve)
        try:
            parts.append(
                partition_by_work(
                    num_tokens, order, curve, setting.num_packs, align=align, last_first=last_first, **limits
                )
            )
        except ConfigError:
            return None  # a document beyond the limit that no legal cut divides
    return parts[0], parts[1]


def _whole(
    rules: CutRules, num_tokens: NDArray[np.int64], count: int, curves: tuple[WorkCurve, WorkCurve]
) -> tuple[SliceColumns, SliceColumns] | None:
    work, limit = work_below(curves, num_tokens), rules.max_pack_tokens
    if limit is not None and num_tokens.max() > limit:
        return None
    tokens = None if limit is None else num_tokens
    groups = longest_first(work, count, num_tokens=tokens, capacity=limit, backend="python")
    # Dear packs first: the short ones at the end drain the pipeline fast.
    ordered = sorted((group for group in groups if group), key=lambda group: -sum_in_order(work[group]))
    columns = whole_document_columns(ordered, num_tokens)
    return columns, columns


def _align(rules: CutRules, num_tokens: NDArray[np.int64], count: int, *curves: WorkCurve) -> int:
    """The attention tile where slices are long compared with it, else 1."""
    tile, limit = rules.tile, rules.max_pack_tokens
    if tile == 1 or (limit is not None and limit < ALIGN_FROM_TILES * tile):
        return 1
    # The last token of the longest document is the dearest; a pack of only such tokens is the shortest.
    longest = int(num_tokens.max())
    edge = work_below(curves, np.array([longest - 1, longest]))
    target = sum_in_order(work_below(curves, num_tokens)) / count
    return tile if target >= ALIGN_FROM_TILES * tile * float(edge[1] - edge[0]) else 1
