"""Plans whose packs are computed by two halves in turn, wherever they may be."""

import msgspec

from evenload.stepplan.validate import validate_plan
from evenload.types.micropack import MicroPack
from evenload.types.plan import StepPlan, seal


def halved_plan(plan: StepPlan, share: float = 0.5) -> StepPlan:
    """The same plan with every pack in halves that may be; `share` of the rows are the first half's. Without tensor
    parallelism none may be."""
    return plan if plan.layout.tp == 1 else with_halves(plan, share)


def with_halves(plan: StepPlan, share: float) -> StepPlan:
    """`halved_plan`, whether it is valid or not."""
    return seal(
        msgspec.structs.replace(
            plan,
            pack_plans=tuple(
                msgspec.structs.replace(
                    packs,
                    forward=tuple(_halved(pack, share) for pack in packs.forward),
                    backward=tuple(_halved(pack, share) for pack in packs.backward),
                )
                for packs in plan.pack_plans
            ),
        )
    )


def num_halved(plan: StepPlan) -> int:
    """Packs in two halves."""
    return sum(pack.first_rows > 0 for packs in plan.pack_plans for pack in (*packs.forward, *packs.backward))


def halved_and_valid(plan: StepPlan, share: float = 0.5) -> StepPlan:
    """`halved_plan` of a plan of which some pack can be in halves."""
    halved = halved_plan(plan, share)
    validate_plan(halved)
    assert num_halved(halved)
    return halved


def _halved(pack: MicroPack, share: float) -> MicroPack:
    rows = pack.pad_to * len(pack.slices) if pack.pad_to else pack.num_tokens
    first = max(1, round(share * rows))
    if first >= rows:
        return pack
    return msgspec.structs.replace(pack, first_rows=first)
