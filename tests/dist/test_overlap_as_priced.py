"""What hides transfers of keys and values: the price says which rows, the runtime is watched while it attends."""

import numpy as np
import pytest

from context_cases import covered_rows
from context_plans import RULES, context_plan
from evenload.cost.pack_pricing import PerRankPacks
from evenload.stepplan.cp_rows import ranked_packs
from evenload.stepplan.resimulation import replica_columns
from evenload.types.plan import StepPlan, encode_plan


def both_directions(plan: StepPlan, dp_rank: int) -> tuple[PerRankPacks, PerRankPacks]:
    columns = replica_columns(plan, dp_rank)
    return ranked_packs(columns.forward, columns.backward, columns.shardings, plan.layout.cp)


def rows_as_priced(ranked: PerRankPacks, pack: int, rank: int) -> tuple[int, int]:
    """(rows behind whose attention transfers hide, others) of a rank; where nothing travels, nothing hides."""
    at = int(ranked.first_rank[pack]) + rank
    own = slice(*ranked.rows.pack_offset[at : at + 2].tolist())
    rows = (ranked.rows.stop - ranked.rows.start)[own]
    hides = ranked.is_local[own] & bool(ranked.whole_tokens[pack] + ranked.cut_tokens[pack])
    return int(rows[hides].sum()), int(rows[~hides].sum())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("cp", [2, 3])
def test_gathers_hide_behind_local_documents_and_nothing_else(gloo_pool, cp, rule):
    """Pack by pack and rank by rank, in both directions: rows attended to during transfers are those priced so."""
    owner = {0: -1, **{doc: doc % cp for doc in range(1, 7)}}  # "dacp": one long document shared, short ones whole
    lengths = {0: 60, **{doc: 5 + doc for doc in range(1, 7)}} if rule == "dacp" else None
    covered = 0
    for seed in range(3):
        plan = context_plan(40 * cp + seed, cp=cp, rule=rule, lengths=lengths, owner=owner if lengths else None)
        result = gloo_pool.run(cp, covered_rows, encode_plan(plan), "all_gather")
        for direction, ranked in enumerate(both_directions(plan, 0)):
            for rank in range(cp):
                expected = [rows_as_priced(ranked, pack, rank) for pack in range(len(ranked.num_ranks()))]
                assert result[rank][direction] == expected
                covered += sum(rows for rows, _ in expected)
    assert covered or rule != "dacp"


@pytest.mark.parametrize("cp", [2, 3])
def test_a_ring_hides_behind_all_rounds_but_the_last(gloo_pool, cp):
    """Of a document that all ranks share, every row is attended to once a rank whose keys it sees."""
    plan = context_plan(1, cp=cp, rule="per_document", lengths={0: 60 * cp}, whole=True)
    result = gloo_pool.run(cp, covered_rows, encode_plan(plan), "ring")
    covered, bare = np.sum([rank[0][0] for rank in result], axis=0).tolist()
    assert bare > 0
    assert covered / (covered + bare) == pytest.approx((cp - 1) / cp, abs=0.15)
