"""`EnginePlanner`: an engine's `auto` is the fastest by its own price, and plans stay those of the strategies."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cost_samples import sample_coefficients, sample_model
from evenload.config.keys import plan_options
from evenload.errors import ConfigError
from evenload.explore.batches import SampledBatch
from evenload.integrations.catalog import ENGINES, runnable
from evenload.integrations.evaluate import evaluate_engine
from evenload.integrations.planner import EnginePlanner
from evenload.planning.deferral import DelayState
from evenload.planning.planner import StepPlanner
from evenload.stepplan.validate import validate_plan
from evenload.types.document import Document
from evenload.types.layout import even_layout

OPTIONS = {"max_pack_tokens": 64, "candidates": 3}


def documents(lengths) -> tuple[Document, ...]:
    return tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in enumerate(lengths))


def sampled_of(batches) -> list[SampledBatch]:
    ids = iter(range(1000))
    return [
        SampledBatch(tuple(Document(doc_id=next(ids), num_tokens=n, num_label_tokens=n - 1) for n in lengths), (), 0)
        for lengths in batches
    ]


def planner_of(engine: str, *, pp: int = 1, **options) -> EnginePlanner:
    layout = even_layout(4, dp=2, pp=pp)
    return EnginePlanner(
        ENGINES[engine], sample_model(num_layers=4), sample_coefficients(), layout, plan_options(OPTIONS | options)
    )


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 64), min_size=1, max_size=16),
    engine=st.sampled_from(["megatron", "deepspeed", "fsdp2", "torchtitan"]),
    is_delaying=st.booleans(),
)
def test_auto_is_never_slower_than_a_strategy_and_trains_everything(lengths, engine, is_delaying):
    planner = planner_of(engine, pp=2 if ENGINES[engine].schedules else 1)
    state = DelayState() if is_delaying else None
    result = planner.propose(3, documents(lengths), "auto", state=state)
    validate_plan(result.plan, max_pack_tokens=64)
    assert {document.doc_id for document in result.plan.documents} == set(range(len(lengths)))
    best_s = planner.price(result).step_time_s
    for name in runnable(planner.profile, planner.options, planner.layout)[0]:
        assert best_s <= planner.price(planner.propose(3, documents(lengths), name)).step_time_s * (1 + 1e-12)


@pytest.mark.parametrize("strategy", ["balanced", "best_fit", "wlb"])
def test_a_strategy_plans_for_an_engine_as_ever(strategy):
    lengths = documents([60, 33, 20, 20, 9, 3, 1])
    planner = planner_of("deepspeed")
    ours = StepPlanner(
        sample_model(num_layers=4), sample_coefficients(), planner.layout, None, plan_options(OPTIONS), host="unlimited"
    )
    assert planner.propose(0, lengths, strategy).plan == ours.propose(0, lengths, strategy).plan


def test_the_users_number_of_micro_batches_is_kept():
    planner = planner_of("trainer", micro_batches=3)
    result = planner.propose(0, documents([60, 33, 20, 20, 9, 3]), "auto")
    assert max(len(packs.forward) for packs in result.plan.pack_plans) <= 3


def test_what_an_engine_cannot_run_is_refused():
    planner = planner_of("megatron")
    with pytest.raises(ConfigError, match="slimpack cuts documents"):
        planner.propose(0, documents([5, 6]), "slimpack")


STRATEGIES = ("padded", "best_fit", "fixed_greedy", "balanced", "skrull")
"""Of those that run on the engine all that put nothing off to later steps."""
BATCHES = st.lists(st.lists(st.integers(1, 64), min_size=1, max_size=10), min_size=1, max_size=4)
# Step by step the fastest needs more micro-batches in one step than a strategy beside it, and all steps then pay.
UNEVEN = [[51, 5, 2, 1, 8, 4, 4, 6, 11], [56, 15, 2], [12, 49, 44, 7, 11]]


@settings(max_examples=15, deadline=None)
@given(batches=BATCHES, engine=st.sampled_from([("trainer", 1), ("torchtitan", 2)]))
@example(batches=UNEVEN, engine=("trainer", 1))
def test_auto_at_one_number_of_micro_batches_is_never_slower_over_a_run(batches, engine):
    """What is the fastest of a step alone may be the slowest of a run in which all steps have as many."""
    name, pp = engine
    sampled = sampled_of(batches)
    results = evaluate_engine(planner_of(name, pp=pp), sampled, (*STRATEGIES[: 4 if pp > 1 else 5], "auto"))
    by_name = {result.name: result for result in results.results}
    auto = by_name["auto"]
    assert auto.why == ""
    for result in results.results:
        if result.mean_step_time_s is not None:
            assert auto.mean_step_time_s <= result.mean_step_time_s * (1 + 1e-12)


@settings(max_examples=15, deadline=None)
@given(
    batches=BATCHES,
    engine=st.sampled_from([("trainer", 1), ("torchtitan", 2), ("deepspeed", 1)]),
    window=st.sampled_from([1, 2]),
)
@example(batches=UNEVEN, engine=("trainer", 1), window=1)
def test_what_is_remembered_is_what_would_be_planned_again(batches, engine, window):
    """Whoever asks for it: a strategy's own row, or `auto` at any number of micro-batches."""
    name, pp = engine
    sampled = sampled_of(batches)
    planner = planner_of(name, pp=pp, window=window)
    strategies = tuple(runnable(planner.profile, planner.options, planner.layout)[0]) + ("auto",) * (window == 1)
    once = evaluate_engine(planner, sampled, strategies)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(EnginePlanner, "remembering", lambda self: self)
        assert evaluate_engine(planner, sampled, strategies).results == once.results


def test_an_evaluation_plans_no_step_twice_by_one_strategy(monkeypatch):
    request = []
    propose = StepPlanner.answer

    def counted(self, one):
        if self.options.micro_batches is None:
            request.append((one.step, one.strategy))
        return propose(self, one)

    monkeypatch.setattr(StepPlanner, "answer", counted)
    evaluate_engine(planner_of("trainer"), sampled_of([[9], [10], [11]]), None)
    twice = {one for one in request if request.count(one) > 1}
    assert not {one for one in twice if one[1] != "wlb"}
