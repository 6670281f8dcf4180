"""`SwitchPrices`: what changes between the layouts of one run cost, in seconds and bytes, for decisions.

Where ranks of a machine read each other's memory, a switch is priced from the moves that the runtime makes
(`stall`): once a machine over a slow link, piece by piece what is shared. Where everything is sent, from closed forms
over devices and units (`cost.switch`), which large clusters need: moves are counted in plain Python.
"""

from evenload.cost.coefficients import CostCoefficients
from evenload.cost.switch import switch_seconds
from evenload.plan.reconfiguration.stall import stall_seconds, state_seconds
from evenload.plan.reconfiguration.switch_memory import SwitchMemory, switch_memory
from evenload.plan.reconfiguration.switch_pieces import SwitchPieces, model_pieces
from evenload.types.layout import ParallelLayout
from evenload.types.model import ModelSpec


class SwitchPrices:
    """Of one run. Layouts of any generation.

    Args:
        model, start: of the run; only pp, dp and layers differ from one layout to another.
        coefficients: of any of its layouts.
        moved: of a run that trains; None = the model's units, all shared where copies were measured.
    """

    def __init__(
        self,
        model: ModelSpec,
        start: ParallelLayout,
        coefficients: CostCoefficients,
        moved: SwitchPieces | None = None,
    ) -> None:
        self.given, self._model = moved, model
        if moved is None:
            pieces = model_pieces(model, start.tp)
            is_shared = coefficients.copies is not None
            moved = SwitchPieces(
                pieces=pieces,
                shared=frozenset(range(len(pieces))) if is_shared else frozenset(),
                ranks_per_machine=coefficients.devices_per_node,
                tp=start.tp,
            )
        self._moved = moved
        self._seconds: dict[tuple[ParallelLayout, ParallelLayout], tuple[float, float]] = {}
        self._memory: dict[tuple[ParallelLayout, ParallelLayout], SwitchMemory] = {}

    def seconds(
        self, coefficients: CostCoefficients, old: ParallelLayout, new: ParallelLayout, hidden_s: float
    ) -> float:
        """For which training stands still: until the step begins, and until its optimizer state is there.

        Args:
            coefficients: of the new layout.
            hidden_s: of the step before it needs its optimizer state.
        """
        old, new = old.arrangement, new.arrangement
        if coefficients.copies is None:
            return switch_seconds(self._model, coefficients, old, new, hidden_s)
        if old == new:
            return 0.0
        if (old, new) not in self._seconds:
            moves = self._moved.moves(old, new)
            self._seconds[old, new] = (
                stall_seconds(moves, self._moved, coefficients, old, new, is_taken=True),
                state_seconds(moves, self._moved, coefficients),
            )
        stall_s, state_s = self._seconds[old, new]
        return stall_s + max(0.0, state_s - hidden_s)

    def memory(self, old: ParallelLayout, new: ParallelLayout) -> SwitchMemory:
        """What a change takes of the fullest device."""
        key = old.arrangement, new.arrangement
        if key not in self._memory:
            self._memory[key] = switch_memory(self._moved, *key)
        return self._memory[key]
