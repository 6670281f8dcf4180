"""`NonFiniteSteps`: steps whose loss or gradient is NaN or infinite stop the run, or are left out and counted.

Whether a step is finite is decided from sums over all ranks, so all decide alike, and before the optimizer changes
anything: weights, optimizer and checkpoints stay those of the last good step.

Price: for every row of a last stage one sum over the hidden size, 4 bytes a row until the step ends.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
import torch
import torch.distributed as dist

from evenload.data.batches import LoaderState
from evenload.data.ledger import Tally, masked_and_untaught, tally_of, with_skipped
from evenload.errors import NonFiniteStepError
from evenload.feed.step_maker import PlannedStep
from evenload.runtime.comm.mesh import Mesh
from evenload.runtime.executor import HeadOutput, RankRun
from evenload.types.plan import StepPlan

MAX_SKIPPED_IN_A_ROW = 10
"""More steps without any update are no training: the weights themselves must be broken."""

DROPPED_REASON = "not finite"

_MAX_NAMED = 4


class NonFiniteSteps:
    """What became of such steps of one run."""

    def __init__(self, on_nonfinite: Literal["stop", "skip"], mesh: Mesh) -> None:
        self.num_skipped = 0
        """Steps without an update since the run began."""
        self.mesh = mesh
        """Of the layout that runs."""
        self._may_skip = on_nonfinite == "skip"
        self._in_a_row = 0
        self._skipped, self._masked, self._untaught = Tally(), 0, 0  # since the loader's account was loaded

    def note_finite(self) -> None:
        self._in_a_row = 0

    def leave_out(
        self,
        planned: PlannedStep,
        run: RankRun,
        loss: float,
        grad_norm: float,
        before_giving_up: Callable[[], Path | None],
    ) -> str:
        """A step that is not finite: stop, or count its documents as dropped; what to say then. Collective.

        Args:
            loss, grad_norm: of the whole step, the same on every rank.
            before_giving_up: called before the error, on every rank; gives the newest checkpoint.

        Raises:
            NonFiniteStepError: on every rank.
        """
        plan = planned.plan
        text = _account(plan, run, loss, grad_norm, planned.origin, self.mesh)
        self._in_a_row += 1
        if self._may_skip and self._in_a_row < MAX_SKIPPED_IN_A_ROW:
            masked, untaught = masked_and_untaught(plan.documents)
            self._skipped += tally_of(plan.documents)
            self._masked, self._untaught = self._masked + masked, self._untaught + untaught
            self.num_skipped += 1
            return f"{text}. The update was not applied; its documents count as dropped ({DROPPED_REASON})"
        last = before_giving_up()
        advice = (
            "Lower optimizer.learning_rate or lengthen optimizer.warmup_steps, take the document out of the data, or "
            "leave such steps out with train.on_nonfinite=skip"
        )
        if self._may_skip:
            advice = (
                f"{MAX_SKIPPED_IN_A_ROW} steps in a row were so (train.on_nonfinite = 'skip'): lower "
                "optimizer.learning_rate, or go back to an earlier checkpoint"
            )
        raise NonFiniteStepError(
            f"{text}. The update was not applied and nothing was saved; "
            f"{f'the last checkpoint, {last}, is from before' if last else 'there is no checkpoint yet'}. {advice}"
        )

    def account(self, state: LoaderState) -> LoaderState:
        """The loader's state with these steps as dropped: it ran ahead, and has counted them as trained."""
        if not self._skipped.documents:
            return state
        ledger = with_skipped(state.ledger, DROPPED_REASON, self._skipped, self._masked, self._untaught)
        return msgspec.structs.replace(state, ledger=ledger)

    def ledger_lines(self, planned: PlannedStep) -> tuple[str, ...]:
        if not self._skipped.documents:
            return planned.ledger_lines
        return tuple(self.account(planned.loader_state).ledger.lines())


class _Suspect(NamedTuple):
    """A pack whose loss or gradient is not finite, and its documents of which that is so."""

    replica: int
    pack: int
    doc_ids: tuple[int, ...]


def _account(
    plan: StepPlan, run: RankRun, loss: float, grad_norm: float, origin: Callable[[int], str], mesh: Mesh
) -> str:
    """What is not finite and where it comes from; the same on every rank. Collective over the control group."""
    mine = ([_Suspect(mesh.dp_rank, *found) for output in run.heads if (found := _suspect(output))], len(run.heads))
    everyone: list[tuple[list[_Suspect], int]] = [([], 0)] * mesh.num_ranks
    dist.all_gather_object(everyone, mine, group=mesh.control)
    suspects = sorted({suspect for found, _ in everyone for suspect in found})
    num_packs = sum(count for _, count in everyone)
    text = f"step {plan.step}: the loss is {loss:g} and the gradient norm {grad_norm:g}"
    if not suspects:
        return f"{text}; the loss of every pack is finite, so a number became too large on the way back"
    if num_packs > 1 and sum(len(found) for found, _ in everyone) == num_packs:
        text += ", in every pack, so the weights are more likely the cause than a document"
    named = [_words(suspect, plan, origin) for suspect in suspects[:_MAX_NAMED]]
    more = f", and {len(suspects) - _MAX_NAMED} packs more" if len(suspects) > _MAX_NAMED else ""
    return f"{text}. It comes from {'; '.join(named)}{more}"


def _suspect(output: HeadOutput) -> tuple[int, tuple[int, ...]] | None:
    is_bad = ~torch.isfinite(output.row_sums)
    if bool(torch.isfinite(output.loss)) and not bool(is_bad.any()):
        return None
    edges = [0]
    for _, start, stop in output.ranges:
        edges.append(edges[-1] + stop - start)
    everything = tuple(sorted({doc_id for doc_id, _, _ in output.ranges}))
    if edges[-1] != len(is_bad):
        return output.pack, everything  # A tensor-parallel rank has other rows than the pack.
    bad = {
        doc_id
        for (doc_id, _, _), low, high in zip(output.ranges, edges[:-1], edges[1:], strict=True)
        if bool(is_bad[low:high].any())
    }
    return output.pack, tuple(sorted(bad)) or everything


def _words(suspect: _Suspect, plan: StepPlan, origin: Callable[[int], str]) -> str:
    lengths = {document.doc_id: document.num_tokens for document in plan.documents}
    documents = [
        f"document {doc_id} ({lengths[doc_id]:,} tokens, {origin(doc_id)})" for doc_id in suspect.doc_ids[:_MAX_NAMED]
    ]
    more = f" and {len(suspect.doc_ids) - _MAX_NAMED} more" if len(suspect.doc_ids) > _MAX_NAMED else ""
    return f"backward pack {suspect.pack} of replica {suspect.replica} with {', '.join(documents)}{more}"
