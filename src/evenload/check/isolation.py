"""Isolation: what a document computes does not depend on its neighbours in a pack.

Every other document, in the order in which they stand in the packs, gets other tokens; then the rest. All rows of the
unchanged documents (outputs and gradients) must come out as before: to the bit on the CPU; on devices whose kernels are
not deterministic as near as two runs on the same tokens come to each other, and to 1 %. The changed documents must come
out different, or the probe would see nothing.

Price: four steps.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from evenload.check.step_runner import Seen, StepRunner
from evenload.check.verdict import Verdict, failed, passed, skipped
from evenload.data.blocks import TokenTable
from evenload.data.encoders import IGNORE_INDEX
from evenload.runtime.comm.mesh import Mesh
from evenload.types.counted import counted
from evenload.types.plan import StepPlan

_NOISE_FACTOR, _MOST_NOISE = 4.0, 1e-2


def check_isolation(
    runner: StepRunner,
    plans: Sequence[StepPlan],
    tokens: Mapping[int, NDArray[np.int32]],
    vocab_size: int,
    mesh: Mesh,
) -> Verdict:
    """Run the probe on every replica at once, on the first plan that puts several documents into a pack. Collective."""
    plan = next((plan for plan in plans if _num_shared_packs(plan)), None)
    if plan is None:
        found = f"{counted(len(tokens), 'document')} under {counted(len(plans), 'plan')}"
        return skipped("isolation", found, "no pack holds two documents, so none can reach another")
    order, shared_packs = _order_in_packs(plan), _num_shared_packs(plan)
    before = runner.run(plan, tokens).seen
    noise = _largest_difference(before, runner.run(plan, tokens).seen, set(order))
    leak, blind = 0.0, 0
    for parity in (0, 1):
        changed = set(order[parity::2])
        others = set(order) - changed
        after = runner.run(plan, _with_other_tokens(tokens, changed, vocab_size)).seen
        leak = max(leak, _largest_difference(before, after, others))
        moved = {key[:2] for key, rows in before.items() if not torch.equal(rows, after[key])}
        # A document without any label has no gradient, whatever its tokens are.
        alive = {key[:2] for key, rows in before.items() if key[1] in changed and rows.any()}
        blind += sum(key not in moved for key in alive)
    everyone: list[tuple[float, float, int, int]] = [(0.0, 0.0, 0, 0)] * mesh.layout.world_size
    dist.all_gather_object(everyone, (leak, noise, blind, len({key[:2] for key in before})), group=mesh.control)
    leaks, noises, blinds, counts = zip(*everyone, strict=True)
    leak, noise, blind, observed = max(leaks), max(noises), sum(blinds), sum(counts)
    # The CPU's kernels are deterministic: whatever differs there was carried from elsewhere.
    allowed = 0.0 if mesh.device.type == "cpu" else min(_NOISE_FACTOR * noise, _MOST_NOISE)
    near = "to the bit" if leak == 0 else f"to {leak:.1e} of the largest value, allowed {allowed:.1e}"
    found = (
        f"{counted(len(order), 'document')} in {shared_packs} shared packs of {plan.strategy}: outputs and gradients "
        f"unchanged {near} while every other document changes"
    )
    if not max(leak, noise if mesh.device.type == "cpu" else 0.0) <= allowed:
        why = "tokens of one document reach another in the same pack: attention or labels cross a boundary"
        return failed("isolation", found.replace("unchanged to", "changed by"), why)
    if blind:
        why = f"{blind} of {observed} documents' rows did not change with their tokens: the probe does not see them"
        return failed("isolation", found, why)
    return passed("isolation", found)


def _with_other_tokens(
    tokens: Mapping[int, NDArray[np.int32]], changed: set[int], vocab_size: int
) -> Mapping[int, NDArray[np.int32]]:
    """Every token of these documents is the next one of the vocabulary, and so is its label, where it has one: as many
    tokens are trained as before."""
    if not isinstance(tokens, TokenTable):
        return {doc: (row + 1) % vocab_size if doc in changed else row for doc, row in tokens.items()}
    of_changed = np.repeat(np.isin(tokens.doc_ids, list(changed)), np.diff(tokens.edges))

    def next_ids(ids: NDArray[np.int32]) -> NDArray[np.int32]:
        return np.where(of_changed & (ids != IGNORE_INDEX), (ids + 1) % vocab_size, ids).astype(np.int32)

    labels = None if tokens.labels is None else next_ids(tokens.labels)
    return TokenTable(tokens.doc_ids, tokens.edges, next_ids(tokens.tokens), labels)


def _num_shared_packs(plan: StepPlan) -> int:
    return sum(len(pack.slices) > 1 for packs in plan.pack_plans for pack in packs.forward)


def _order_in_packs(plan: StepPlan) -> list[int]:
    """Documents by where they first stand in a forward pack, so that neighbours differ in parity."""
    pieces = (piece.doc_id for packs in plan.pack_plans for pack in packs.forward for piece in pack.slices)
    return list(dict.fromkeys(pieces))


def _largest_difference(before: Seen, after: Seen, documents: set[int]) -> float:
    """Over the rows of these documents, relative to the largest value of their kind."""
    worst = 0.0
    for what in ("output", "gradient"):
        keys = [key for key in before if key[0] == what and key[1] in documents and before[key].numel()]
        scale = max((float(before[key].abs().max()) for key in keys), default=0.0)
        for key in keys:
            difference = float((before[key].double() - after[key].double()).abs().max())
            worst = np.maximum(worst, difference / scale if scale else difference)  # NaN is a difference too
    return float(worst)
