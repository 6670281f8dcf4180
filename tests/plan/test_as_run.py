"""Candidates as they run: rules of sharding apart, the slowest rank, nothing where nobody shares."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.cost.coefficients import PassCoefficients
from evenload.plan.planner import StepPlanner
from evenload.plan.problem import PlanOptions
from evenload.types.cluster import LinkSpec
from evenload.types.document import Document
from evenload.types.layout import even_layout

FREE = LinkSpec(bandwidth_bytes_per_s=1e18, latency_s=0.0)


def planner(cp: int, rule: str, link: LinkSpec = FREE, prefix_s: float = 0.0, **changes) -> StepPlanner:
    """Backward takes twice forward in every part, so that one rank is the slowest in both."""
    passes = {
        name: PassCoefficients(
            linear_s_per_token=factor * 1.0, attention_s_per_pair=factor * 0.1, prefix_s_per_token=factor * prefix_s
        )
        for name, factor in (("forward", 1.0), ("backward", 2.0))
    }
    free = {"embedding_s_per_token": 0.0, "head_s_per_token": 0.0, "head_pack_s": 0.0}
    coefficients = sample_coefficients(intra_node=link, devices_per_node=8, **passes, **free, **changes)
    options = PlanOptions(cp_sharding=rule, policy="replay", max_pack_tokens=1000)  # type: ignore[arg-type]
    return StepPlanner(sample_model(num_layers=1), coefficients, even_layout(1, cp=cp), None, options, host="unlimited")


def documents(lengths: list[int]) -> tuple[Document, ...]:
    return tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n) for i, n in enumerate(lengths))


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(1, 90), min_size=1, max_size=8), st.integers(2, 5), st.sampled_from([0.0, 0.5]))
def test_a_pack_takes_what_its_slowest_rank_takes_under_the_rule_and_the_best_is_chosen(lengths, cp, prefix_s):
    """WLB's imbalance is in the predicted time, and packs that nobody waits for have the best of it each."""
    seconds = {}
    for rule in ("per_sequence", "per_document", "adaptive", "mixed"):
        [choice] = planner(cp, rule, prefix_s=prefix_s).propose(0, documents(lengths), "best_fit").choices
        tasks = choice.candidate.tasks
        seconds[rule] = (tasks.forward_s + tasks.backward_s)[:, 0]
    np.testing.assert_allclose(seconds["adaptive"], np.minimum(seconds["per_sequence"], seconds["per_document"]))
    assert (seconds["mixed"] <= seconds["adaptive"] * (1 + 1e-12)).all()


def test_rules_of_sharding_have_times_of_their_own():
    """One long and many short documents, by hand: as one sequence the rank with the long one's end waits for nobody."""
    lengths = [64, *([8] * 8)]
    seconds = {}
    for rule in ("per_sequence", "per_document"):
        [choice] = planner(2, rule).propose(0, documents(lengths), "best_fit").choices
        seconds[rule] = float(choice.candidate.tasks.forward_s.sum())
    # per document: 64 tokens a rank and half of all pairs each.
    assert seconds["per_document"] == pytest.approx(64 + 0.1 * (64 * 65 / 2 + 8 * 36) / 2)
    # As one sequence in chunks of 32: rank 0 has rows 0..31 of the long document and the last four short ones.
    first, second = 32 * 33 / 2, 64 * 65 / 2 - 32 * 33 / 2
    assert seconds["per_sequence"] == pytest.approx(64 + 0.1 * max(first + 4 * 36, second + 4 * 36))


def test_kernels_of_few_rows_behind_many_keys_decide():
    """WLB §5.3: where reading keys costs more than unequal rows, documents are cut into fewer ranges."""
    lengths = [64, *([8] * 8)]
    chosen = [
        planner(2, "adaptive", prefix_s=prefix_s).propose(0, documents(lengths), "best_fit").choices[0].candidate
        for prefix_s in (0.0, 10.0)
    ]
    assert [one.shardings for one in chosen] == [("per_document",), ("per_sequence",)]
