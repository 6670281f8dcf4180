import msgspec
import pytest

from evenload.data.ledger import Ledger, LedgerState, Tally, account_skipped, warn_without_loss
from evenload.errors import DataError, InvalidPlanError
from evenload.types.document import Document
from evenload.types.layout import even_layout
from evenload.types.plan import LeftOut, Prediction, StepPlan


def make_plan(trained, left_out=()):
    return StepPlan(
        step=3,
        strategy="test",
        layout=even_layout(1),
        documents=tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=n - 1) for i, n in trained),
        num_label_tokens=1,
        pack_plans=(),
        schedules=(),
        times=(),
        predicted=Prediction(step_time_s=0.0, per_replica_s=(), peak_memory_bytes=0),
        left_out=tuple(LeftOut(doc_id=i, num_tokens=n, reason=reason) for i, n, reason in left_out),
    )


def record(ledger, plan):
    left = [Document(doc_id=one.doc_id, num_tokens=one.num_tokens, num_label_tokens=0) for one in plan.left_out]
    ledger.record_step(plan, {one.doc_id: one for one in (*plan.documents, *left)})


def tally(documents, tokens):
    return Tally(documents=documents, tokens=tokens)


def test_every_token_ends_up_in_one_row():
    ledger = Ledger(LedgerState(read=tally(5, 150), dropped={"overlong": tally(1, 50)}))
    ledger.check(tally(4, 100))
    ledger.add_handed_out(tally(3, 60), tally(0, 0))
    ledger.check(tally(1, 40))
    record(ledger, make_plan([(0, 10)], [(1, 20, "deferred"), (2, 30, "too_long")]))
    ledger.check(tally(1, 40))
    state = ledger.state
    assert (state.trained, state.deferred, state.in_flight) == (tally(1, 10), tally(1, 20), tally(0, 0))
    assert state.dropped == {"overlong": tally(1, 50), "too_long": tally(1, 30)}
    ledger.add_handed_out(tally(1, 40), tally(1, 20))  # the deferred document comes again
    record(ledger, make_plan([(1, 20), (3, 40)]))
    ledger.check(tally(0, 0))
    assert (ledger.state.trained, ledger.state.deferred) == (tally(3, 70), tally(0, 0))
    assert [line.split()[0] for line in ledger.state.lines()] == [
        "read", "trained", "dropped", "dropped", "deferred", "waiting",
    ]  # fmt: skip
    assert "150 tokens" in ledger.state.lines()[0]


def test_documents_without_any_label_are_counted_and_told():
    ledger = Ledger(LedgerState(read=tally(4, 61)))
    ledger.add_handed_out(tally(4, 61), tally(0, 0))
    lengths = {0: (10, 9), 1: (20, 0), 2: (1, 0), 3: (30, 0)}
    documents = tuple(Document(doc_id=i, num_tokens=n, num_label_tokens=m) for i, (n, m) in lengths.items())
    record(ledger, msgspec.structs.replace(make_plan([]), documents=documents))
    assert (ledger.state.masked, ledger.state.untaught) == (52, 3)
    lines = ledger.state.lines()
    assert "4 documents" in lines[1]
    assert "52 of them masked" in lines[1]
    assert lines[2].split() == ["3", "of", "these", "documents", "taught", "nothing:", "no", "loss", "at", "all"]
    skipped = account_skipped(ledger.state, "nonfinite", tally(2, 50), 50, 2)
    assert (skipped.trained, skipped.masked, skipped.untaught) == (tally(2, 11), 2, 1)
    warning = warn_without_loss(documents, lambda doc_id: f"place {doc_id}")
    # One token has nothing before it that it could be predicted from, which is no fault of the data's.
    assert warning.startswith(
        "2 of the first 4 documents have no token with a loss and teach nothing, such as place 1:"
    )
    assert warn_without_loss(documents[:1] + documents[2:3], str) == ""
    assert not any("taught" in line for line in LedgerState(trained=tally(1, 5)).lines())
    old = msgspec.json.decode(b'{"read": [2, 11], "trained": [2, 11], "masked": 2}', type=LedgerState)
    assert old.untaught == 0, "a state from before the count goes on"


def test_lost_or_doubled_tokens_are_found():
    ledger = Ledger(LedgerState(read=tally(1, 10)))
    with pytest.raises(DataError, match="read 1 documents of 10 tokens, accounted for 0 of 0"):
        ledger.check(tally(0, 0))
    with pytest.raises(DataError, match="accounted for 1 of 11"):
        ledger.check(tally(1, 11))


def test_noting_a_step_twice_is_refused_and_changes_nothing():
    ledger = Ledger(LedgerState(read=tally(1, 10)))
    ledger.add_handed_out(tally(1, 10), tally(0, 0))
    record(ledger, make_plan([(0, 10)]))
    before = ledger.state
    with pytest.raises(InvalidPlanError, match="step 3"):
        record(ledger, make_plan([(0, 10)]))
    assert ledger.state == before
