"""Packs of a `Setting` in Python: the slices that the core's `cut_packs` must make, to the token."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from evenload.errors import ConfigError
from evenload.planning.candidates import ALIGN_FROM_TILES, CutRules, Setting
from evenload.types.columns import SliceColumns, WorkCurve, whole_document_columns
from evenload.types.tree_columns import NO_TREES, TreeColumns
from reference.bin_packing import longest_first
from reference.chain_free import chain_free_columns, sum_in_order, work_below
from reference.pack_halving import halve_pack
from reference.partition import partition_by_work


def cut_packs(
    rules: CutRules, num_tokens: NDArray[np.int64], setting: Setting, ranks: int = 1, trees: TreeColumns = NO_TREES
) -> tuple[SliceColumns, SliceColumns] | None:
    """As `evenload.planning.candidates.trial_packs`."""
    packs = _packs(rules, num_tokens, setting, trees)
    if packs is None:
        return None
    forward, backward = packs
    limits = {"min_slice_tokens": rules.min_slice_tokens, "may_cut": setting.cut != "whole", "trees": trees}
    for _ in range(setting.taper[0]):
        forward = halve_pack(forward, 0, rules.forward, backward=False, **limits) or forward
    for _ in range(setting.taper[1]):
        at = backward.num_packs - 1
        backward = halve_pack(backward, at, rules.backward, backward=True, **limits) or backward
    forward, backward = (replace(one, cp=np.full(one.num_slices, ranks, np.int64)) for one in (forward, backward))
    return forward, backward


def _packs(
    rules: CutRules, num_tokens: NDArray[np.int64], setting: Setting, trees: TreeColumns
) -> tuple[SliceColumns, SliceColumns] | None:
    everyone = np.arange(len(num_tokens))
    curves = rules.forward, rules.backward
    forward, backward = (replace(curve, linear_s=setting.token_weight * curve.linear_s) for curve in curves)
    if setting.cut == "whole":
        return _whole(rules, num_tokens, setting.num_packs, (forward, backward), trees)
    limits = {"min_slice_tokens": rules.min_slice_tokens, "max_pack_tokens": rules.max_pack_tokens, "trees": trees}
    if setting.cut == "symmetric":
        align = _align(rules, num_tokens, setting.num_packs, trees, forward, backward)
        return chain_free_columns(num_tokens, (forward, backward), setting.num_packs, align=align, **limits)
    order = np.argsort(-work_below((forward,), num_tokens, trees, everyone), kind="stable").astype(np.int32)
    parts = []
    for curve, last_first in ((forward, False), (backward, True)):
        align = _align(rules, num_tokens, setting.num_packs, trees, curve)
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
    rules: CutRules, num_tokens: NDArray[np.int64], count: int, curves: tuple[WorkCurve, WorkCurve], trees: TreeColumns
) -> tuple[SliceColumns, SliceColumns] | None:
    work = work_below(curves, num_tokens, trees, np.arange(len(num_tokens)))
    limit = rules.max_pack_tokens
    if limit is not None and num_tokens.max() > limit:
        return None
    tokens = None if limit is None else num_tokens
    groups = longest_first(work, count, num_tokens=tokens, capacity=limit)
    # Expensive packs first: the short ones at the end drain the pipeline fast.
    ordered = sorted((group for group in groups if group), key=lambda group: -sum_in_order(work[group]))
    columns = whole_document_columns(ordered, num_tokens)
    return columns, columns


def _align(rules: CutRules, num_tokens: NDArray[np.int64], count: int, trees: TreeColumns, *curves: WorkCurve) -> int:
    """The attention tile where slices are long compared with it, else 1."""
    tile, limit = rules.tile, rules.max_pack_tokens
    if tile == 1 or (limit is not None and limit < ALIGN_FROM_TILES * tile):
        return 1
    # The last token of the longest document is the most expensive; a pack of only such tokens is the shortest.
    of_documents = [trees.depth_stop[at : at + n].max() for at, n in zip(trees.first, trees.count, strict=True)]
    longest = int(max(of_documents)) if trees.has_any else int(num_tokens.max())
    edge = work_below(curves, np.array([longest - 1, longest]))
    target = sum_in_order(work_below(curves, num_tokens, trees, np.arange(len(num_tokens)))) / count
    return tile if target >= ALIGN_FROM_TILES * tile * float(edge[1] - edge[0]) else 1
