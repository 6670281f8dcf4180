"""Rows of shared packs in columns: those of `rank_rows`, which the runtime computes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from context_plans import RULES, context_plan, merged_plan
from evenload.cost.pack_split import RankedPacks
from evenload.stepplan.plan_tasks import replica_columns
from evenload.stepplan.rank_rows import PackRows, ranked_packs, replica_rows
from evenload.types.plan import StepPlan


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 10**6), cp=st.integers(2, 5), rule=st.sampled_from(RULES))
def test_rows_are_those_that_the_runtime_computes(seed, cp, rule) -> None:
    require_equal_rows(context_plan(seed, cp=cp, rule=rule))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), dp=st.sampled_from([2, 4]), cp=st.integers(1, 2), rule=st.sampled_from(RULES))
def test_rows_under_dp_merge_too(seed, dp, cp, rule) -> None:
    require_equal_rows(merged_plan(seed, dp=dp, cp=cp, rule=rule))


def require_equal_rows(plan: StepPlan) -> None:
    doc_ids = [document.doc_id for document in plan.documents]
    for dp_rank, packs in enumerate(plan.pack_plans):
        rows, columns = replica_rows(plan, dp_rank), replica_columns(plan, dp_rank)
        shardings = [pack.sharding for pack in packs.forward]
        found = ranked_packs(columns.forward, columns.backward, shardings, plan.layout.cp)
        for ranked, listed in zip(found, (packs.forward, packs.backward), strict=True):
            for index, pack in enumerate(listed):
                expected = rows.of_pack(pack)
                if expected is None:
                    assert ranked.num_ranks()[index] == 1
                    assert of_rank(ranked, index, 0, doc_ids) == sorted(
                        (piece.doc_id, piece.start, piece.stop, False) for piece in pack.slices
                    )
                else:
                    require_equal_pack(ranked, index, expected, doc_ids)


def require_equal_pack(ranked: RankedPacks, index: int, expected: PackRows, doc_ids: list[int]) -> None:
    ranks = len(expected.local)
    assert ranked.num_ranks()[index] == ranks
    for rank in range(ranks):
        shared = [(*own, False) for piece in expected.shared for own in piece.ranges[rank]]
        local = [(*own, True) for own in expected.local[rank]]
        assert of_rank(ranked, index, rank, doc_ids) == sorted(shared + local)
    for is_cut, tokens in ((False, ranked.whole_tokens), (True, ranked.cut_tokens)):
        sent = [piece.stop - piece.start for piece in expected.shared if piece.document.is_cut == is_cut]
        assert tokens[index] == sum(sent)


def of_rank(ranked: RankedPacks, pack: int, rank: int, doc_ids: list[int]) -> list[tuple[int, int, int, bool]]:
    """(document, start, stop, whole on the rank) of its ranges, sorted."""
    rows, at = ranked.rows, int(ranked.first_rank[pack]) + rank
    chosen = slice(*rows.pack_offset[at : at + 2].tolist())
    docs = [doc_ids[doc] for doc in rows.doc[chosen].tolist()]
    columns = (rows.start[chosen].tolist(), rows.stop[chosen].tolist(), ranked.is_local[chosen].tolist())
    return sorted(zip(docs, *columns, strict=True))
