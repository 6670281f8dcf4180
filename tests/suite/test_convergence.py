"""benchmarks/convergence.py says right by how much tokens are late, and a run goes on as if it had not stopped."""

import importlib

import pytest
import torch.distributed as dist

STEPS = 10


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend("benchmarks")
    return importlib.import_module("convergence")


@pytest.fixture
def one_rank(tmp_path):
    """This process as the only rank."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def size(script):
    return script.Size(
        hidden=32, layers=1, vocabulary=300, context=48, steps=STEPS, rows_every=3, seeds=1, modules=4
    )  # fmt: skip


def step(script, number, documents, waiting, loss=1.0, held_out_loss=None):
    return script.StepRecord(
        step=number,
        commit="",
        documents=list(documents),
        tokens=list(documents.values()),
        waiting=waiting,
        label_tokens=sum(documents.values()) - len(documents),
        loss=loss,
        held_out_loss=held_out_loss,
        imbalance=1.0,
    )


def test_delays_as_counted_by_hand(script):
    """Document 1 comes with step 0 and is trained in step 2, after the 4 + 6 tokens of steps 0 and 1; 4 comes with step
    1 and is trained in step 2, after 6. So the mean token of step 2 is (10·2 + 5·1 + 5·0) / 20 steps late."""
    records = [
        step(script, 0, {0: 4}, [1], loss=3.0),
        step(script, 1, {2: 6}, [1, 4], loss=2.0, held_out_loss=2.5),
        step(script, 2, {1: 10, 4: 5, 3: 5}, [], held_out_loss=1.5),
    ]
    late = (10 * 2 + 5 * 1) / 20, (10 * (4 + 6) + 5 * 6) / 20
    assert script.token_delays(records) == [(0.0, 0.0), (0.0, 0.0), pytest.approx(late)]
    first, second = script.curve("wlb", 0, records)
    assert (first.step, first.documents, first.tokens, first.delay_steps, first.held_out_loss) == (2, 2, 10, 0, 2.5)
    assert first.train_loss == pytest.approx((3 * 3 + 2 * 5) / 8)
    assert (second.step, second.documents, second.tokens, second.held_out_loss) == (3, 5, 30, 1.5)
    assert (second.delay_steps, second.delay_tokens) == pytest.approx(late)


@pytest.mark.usefixtures("script")
def test_paragraphs_are_what_stands_between_empty_lines():
    assert importlib.import_module("library_text").paragraphs_of("a\nb\n\n\n  c\n \t\nd\n") == ["a\nb", "  c", "d\n"]


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("name", ["wlb balanced", "fixed 8"])
def test_a_run_that_was_stopped_goes_on_alike(script, size, name, tmp_path, monkeypatch):
    """Losses, order and what waits, to the bit; the delays of its rows are those that its plans had."""
    corpus, planned = tmp_path / "corpus", []
    script.write_corpus(corpus, size)
    record_of = script.record_of

    def keep_delay(report, commit):
        planned.append(report.plan.mean_token_delay_steps)
        return record_of(report, commit)

    way = script.TRAINED[name]
    script.train(corpus, tmp_path / "stopped", way, size, 0, "", stop_after=5)
    assert len(script.read_records(tmp_path / "stopped")) == 5
    with (tmp_path / "stopped" / "log.jsonl").open("a") as log:
        log.write('{"step":5,"docu')  # the process died while it wrote
    script.train(corpus, tmp_path / "stopped", way, size, 0, "")
    monkeypatch.setattr(script, "record_of", keep_delay)
    script.train(corpus, tmp_path / "whole", way, size, 0, "")
    records = script.read_records(tmp_path / "whole")
    assert script.read_records(tmp_path / "stopped") == records
    assert [record.step for record in records] == list(range(STEPS))
    assert [steps for steps, _ in script.token_delays(records)] == pytest.approx(planned)
    assert sum(planned) > 0
    trained = [doc_id for record in records for doc_id in record.documents]
    assert len(set(trained)) == len(trained)
