"""Plans of parts of trees in files."""

import msgspec

from evenload.stepplan.plan_file import decode_plan_file, encode_plan_file
from evenload.types.plan import seal
from plan_building import random_plan


def test_a_part_of_a_single_sequence_comes_back_from_a_file():
    """It has no segments, but says what it computes again, and a plan's digest covers that."""
    plan = random_plan(3, num_layers=4, pp=2, dp=2)
    first, *others = plan.documents
    part = msgspec.structs.replace(first, num_recomputed_tokens=1)
    sealed = seal(msgspec.structs.replace(plan, documents=(part, *others)))
    (back,) = decode_plan_file(encode_plan_file([sealed]))
    assert back.documents == sealed.documents
    assert back.digest == sealed.digest
    assert b"num_recomputed_tokens" not in encode_plan_file([plan])
