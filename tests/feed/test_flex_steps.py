"""Steps whose layout changes, made from real documents: what is known ahead, what travels with a step, exact resume."""

import msgspec
import pytest

from corpus_files import data_config, write_corpus
from evenload.data.batches import decode_state, encode_state
from evenload.data.loader import GlobalBatchLoader
from evenload.feed.step_maker import StepMaker
from evenload.planning.layouts.flex_planner import FlexRunPlanner, PlannerState
from evenload.planning.layouts.measured_layouts import MeasuredLayouts
from evenload.types.layout import even_layout
from flex_cases import NARROW, PUBLISHED, make

# A document of n letters has n + 1 tokens.
SHORT_BATCH, LONG_BATCH = [19] * 8, [299, 199, 1, 1, 1, 1, 1, 1]


def corpus(root, phases):
    """One record a document, in order; batches of eight."""
    texts = ["abcdefgh"[at % 8] * length for lengths in phases for at, length in enumerate(lengths)]
    source = write_corpus(root, "jsonl", texts, num_files=1)
    return data_config(source, batch_documents=8, max_document_tokens=400, shuffle_window=1, streams=1)


def maker_of(config, known_steps, states=None, cap=NARROW, **further):
    loader, state = GlobalBatchLoader(config), PlannerState()
    if states is not None:
        loader.load_state(decode_state(states[0]))
        state = msgspec.json.decode(states[1], type=PlannerState)
    planner = make(4, 1, cap, known_steps=known_steps, **PUBLISHED)
    planner = FlexRunPlanner(planner, **further)
    maker = StepMaker(loader, planner, replicas=lambda layout: [0], max_pack_tokens=400)
    maker.planner_state = state
    return maker


def steps_of(maker, count=None):
    result = []
    while count is None or len(result) < count:
        step = maker.next()
        if step is None:
            break
        result.append(step)
    return result


def told(step):
    """All of a step that must be the same however it was made."""
    return step.plan.digest, step.plan.layout, step.decision, step.loader_state, step.planner_state, step.ledger_lines


@pytest.mark.parametrize("known_steps", [1, 3])
def test_every_step_can_be_resumed_behind_batches_that_were_read_ahead(tmp_path, known_steps):
    phases = [SHORT_BATCH, LONG_BATCH, LONG_BATCH, SHORT_BATCH, SHORT_BATCH, SHORT_BATCH, LONG_BATCH]
    config = corpus(tmp_path, phases)
    whole = steps_of(maker_of(config, known_steps))
    assert len(whole) == len(phases)
    assert sum(step.decision.is_switch for step in whole) >= 2
    generations = [step.plan.layout.generation for step in whole]
    assert generations == sorted(generations)
    assert generations[-1] == sum(step.decision.is_switch for step in whole)
    for at, step in enumerate(whole[:-1]):
        states = encode_state(step.loader_state), msgspec.json.encode(step.planner_state)
        rest = steps_of(maker_of(config, known_steps, states))
        assert [told(one) for one in rest] == [told(one) for one in whole[at + 1 :]]
    # The state and the account of a step know nothing of what was read behind it.
    nothing_ahead = steps_of(maker_of(config, 1))
    assert [step.loader_state for step in whole] == [step.loader_state for step in nothing_ahead]
    assert [step.ledger_lines for step in whole] == [step.ledger_lines for step in nothing_ahead]


def test_lengths_of_coming_batches_decide(tmp_path):
    """Before a switch that three short batches pay for together, and one alone does not."""
    config = corpus(tmp_path, [SHORT_BATCH] * 4)
    keep, switch = (steps_of(maker_of(config, known, cap=None), 1)[0].decision for known in (1, 3))
    assert (keep.known_steps, switch.known_steps) == (1, 3)
    assert switch.keep_s > 2.5 * keep.keep_s


def test_batches_behind_the_end_of_the_run_decide_nothing(tmp_path):
    config = corpus(tmp_path, [SHORT_BATCH] * 4)
    maker = maker_of(config, 3, cap=None)
    assert [maker.next(left).decision.known_steps for left in (3, 2, 1)] == [3, 2, 1]


def test_what_was_measured_is_asked_for_once_a_step(tmp_path):
    config = corpus(tmp_path, [SHORT_BATCH] * 3)
    request = []

    def measured_of(step):
        request.append(step)
        return MeasuredLayouts().with_step(0, even_layout(4, dp=4), 2.0)

    plain = steps_of(maker_of(config, 1, cap=None))
    slow = steps_of(maker_of(config, 1, cap=None, measured_of=measured_of))
    assert request == [0, 1, 2]
    assert [one.decision.keep_s for one in slow] == [pytest.approx(2 * one.decision.keep_s) for one in plain]
