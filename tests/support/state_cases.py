"""States of shared documents on every rank of a `GlooPool`: by forwards alone, and with mistakes in their exchange."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from dist_cases import RankUnderTest, gradients_of_plans
from evenload.runtime.comm.mesh import create_meshes
from evenload.runtime.model.state_calls import StateForm
from evenload.runtime.replay import shared_states
from evenload.runtime.replay.document_states import DocumentStates
from evenload.runtime.replay.shared_states import SharedStates
from evenload.types.plan import decode_plan
from gloo_pool import TIMEOUT_S


def _from_zero(patch: pytest.MonkeyPatch) -> None:
    """Own ranges of all ranks but the first begin from a state of zeros."""
    right = SharedStates._starts

    def starts(self, *given):
        found = right(self, *given)
        return [None if one is None else one * (self._group.rank == 0) for one in found]

    patch.setattr(SharedStates, "_starts", starts)


def _without_gradients(patch: pytest.MonkeyPatch) -> None:
    """What own outputs give to the states before them is dropped."""
    right = shared_states._of_starts
    patch.setattr(shared_states, "_of_starts", lambda *given: [torch.zeros_like(one) for one in right(*given)])


def _without_transition(name: str) -> Callable[[pytest.MonkeyPatch], None]:
    """A state, or its gradient, ends with the next range."""

    def mutate(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(StateForm, name, lambda self, transition, state, num_tokens: torch.zeros_like(state))

    return mutate


def _untransposed(patch: pytest.MonkeyPatch) -> None:
    """Gradients go through M as states do."""
    patch.setattr(StateForm, "adjoint", StateForm.apply)


def _slice_anew(patch: pytest.MonkeyPatch) -> None:
    """Every slice of a shared document begins from zeros."""
    right = DocumentStates.take
    patch.setattr(DocumentStates, "take", lambda *given: torch.zeros_like(right(*given)))


def _gradient_ends(patch: pytest.MonkeyPatch) -> None:
    """No gradient comes from the slice behind."""
    right = DocumentStates.arrive_gradient
    patch.setattr(
        DocumentStates, "arrive_gradient", lambda self, place, gradient: right(self, place, torch.zeros_like(gradient))
    )


MISTAKES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "from zero": _from_zero,
    "L dropped": _without_gradients,
    "M not applied forward": _without_transition("apply"),
    "M not applied backward": _without_transition("adjoint"),
    "M not transposed": _untransposed,
    "slices begin anew": _slice_anew,
    "gradient ends at the slice": _gradient_ends,
}


def mistaken_gradients(mistake: str, *case) -> list:
    """`gradients_of_plans` with a mistake."""
    with pytest.MonkeyPatch.context() as patch:
        MISTAKES[mistake](patch)
        return gradients_of_plans(*case)


def losses_of_forwards(kind: str, changes: dict, plan: bytes, batch: dict) -> tuple[np.ndarray, dict]:
    """This rank's share of every document's label losses, and the weights."""
    decoded = decode_plan(plan)
    meshes = create_meshes([decoded.layout], torch.device("cpu"), timeout_s=TIMEOUT_S)
    rank = RankUnderTest(meshes, decoded.layout, kind, changes, torch.float64)
    weights = {name: torch.from_numpy(one) for name, one in rank.weights().items()}
    return rank.losses(decoded, batch, "all_gather"), weights
