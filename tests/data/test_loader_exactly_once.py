"""Exactly once, whoever reads: ranks, workers, strategies with delay, kills and resumes under another layout."""

import itertools
from collections import Counter

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from corpus_files import data_config, naive_documents, plan_for, train_steps, write_corpus
from evenload.data.batches import decode_state, encode_state
from evenload.data.config import DataConfig
from evenload.data.loader import GlobalBatchLoader
from evenload.feed.step_maker import exchange_tokens
from rank_threads import run_ranks


class Run:
    """A run over several lives: what was trained, step by step, however often it was stopped."""

    def __init__(self, config, delays=True):
        self.config = config
        self.delays = delays
        self.state = None
        self.steps = []

    def go_on(self, num_ranks, num_steps, prefetched=0):
        """Train so many steps (None = to the end) with so many ranks; `prefetched` more are read and lost."""

        def live(rank, peers):
            loader = GlobalBatchLoader(self.config, peers=peers)
            if self.state is not None:
                loader.load_state(decode_state(self.state))
            steps, state = [], self.state
            most = None if num_steps is None else num_steps + prefetched
            for batch in itertools.islice(iter(loader.next_batch, None), most):
                documents = batch.documents + batch.carried
                # Everyone trains every rank's documents once: document d belongs to rank d % ranks.
                wanted = [[d.doc_id for d in documents if d.doc_id % num_ranks == r] for r in range(num_ranks)]
                table = exchange_tokens(batch, wanted, peers)
                plan = plan_for(batch, deferred=delayed(batch) if self.delays else set())
                trained = {d.doc_id for d in plan.documents}
                loader.record_step(batch, plan)
                loader.check_ledger()
                content = {doc_id: tuple(tokens.tolist()) for doc_id, tokens in table.items() if doc_id in trained}
                steps.append((batch.step, batch.epoch, batch.documents, batch.carried, content))
                if num_steps is None or len(steps) <= num_steps:
                    state = encode_state(loader.state())
            loader.close()
            return steps[:num_steps], state, loader.ledger.state

        results = run_ranks(num_ranks, live)
        for _, state, ledger in results:
            assert state == results[0][1], "ranks disagree about the state"
            assert ledger == results[0][2]
        for step in zip(*(steps for steps, _, _ in results), strict=True):
            assert len({(s[0], s[1], s[2], s[3]) for s in step}) == 1, "ranks disagree about the batch"
            self.steps.append((*step[0][:4], {k: v for s in step for k, v in s[4].items()}))
        self.state, self.ledger = results[0][1], results[0][2]


def delayed(batch):
    """Puts some documents off once or twice, as `wlb` does with outliers; none of the last batch."""
    if batch.is_last:
        return set()
    return {d.doc_id for d in batch.documents if d.doc_id % 5 == 2} | {
        d.doc_id for d in batch.carried if d.doc_id % 10 == 2
    }


configs = st.fixed_dictionaries(
    {
        "shuffle_window": st.sampled_from([1, 3, 8, 40]),
        "seed": st.integers(0, 1000),
        "epochs": st.integers(1, 2),
        "overlong": st.sampled_from(["split", "truncate", "drop"]),
        "max_document_tokens": st.integers(3, 40),
    }
)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), changes=configs)
def test_kills_and_resumes_under_any_number_of_ranks_train_everything_once(tmp_path_factory, data, changes):
    texts = data.draw(st.lists(st.text("abä", max_size=30), min_size=1, max_size=30))
    root = write_corpus(
        tmp_path_factory.mktemp("corpus"), data.draw(st.sampled_from(["jsonl", "parquet", "text"])), texts
    )
    limit, overlong = changes["max_document_tokens"], changes["overlong"]
    expected = Counter(naive_documents(texts, limit, overlong))
    if not expected:
        return
    documents, tokens = ({name: st.integers(1, most)} for name, most in (("batch_documents", 7), ("batch_tokens", 90)))
    batching = data.draw(st.fixed_dictionaries(documents) | st.fixed_dictionaries(tokens))
    config = data_config(root, **changes, **batching)
    whole = Run(config)
    whole.go_on(1, None)

    killed = Run(config)
    for _ in range(3):
        lives = data.draw(st.integers(1, 4))
        killed.go_on(data.draw(st.sampled_from([1, 2, 4])), lives, prefetched=data.draw(st.integers(0, 2)))
    killed.go_on(data.draw(st.sampled_from([1, 2, 3])), None)

    assert killed.steps == whole.steps
    assert killed.ledger == whole.ledger
    for run in (whole, killed):
        trained = Counter(content for step in run.steps for content in step[4].values())
        assert trained == Counter({document: count * changes["epochs"] for document, count in expected.items()})
        assert run.ledger.trained.tokens == sum(len(d) * n for d, n in trained.items())
        assert run.ledger.in_flight.tokens == run.ledger.deferred.tokens == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_worker_processes_give_the_same_batches(tmp_path, workers):
    texts = [f"{'word ' * (number % 13)}{number}" for number in range(200)]
    root = write_corpus(tmp_path, "jsonl", texts, num_files=3)
    changes = {"shuffle_window": 64, "batch_documents": 17, "epochs": 2, "max_document_tokens": 200}
    batches = {}
    for count in (0, workers):
        loader = GlobalBatchLoader(data_config(root, **changes, workers=count))
        batches[count] = list(train_steps(loader))
    assert batches[workers] == batches[0]


def test_weights_of_a_mixture_hold_until_a_part_ends_and_nothing_is_lost(tmp_path):
    parts = {"web": (["w" * (number % 17 + 1) for number in range(300)], 3.0), "code": (["c" * 40] * 60, 1.0)}
    mixture = tuple(
        {"name": name, "weight": weight, "sources": (write_corpus(tmp_path / name, "jsonl", texts),)}
        for name, (texts, weight) in parts.items()
    )
    config = mixture_config(mixture, epochs=2)
    whole, resumed = Run(config, delays=False), Run(config, delays=False)
    whole.go_on(1, None)
    resumed.go_on(2, 7, prefetched=1)
    resumed.go_on(4, None)
    assert resumed.steps == whole.steps
    order = [document for step in whole.steps for document in sorted(step[4].items()) if step[1] == 0]
    code = [len(content) if content[0] == ord("c") else 0 for _, content in order]
    total = [len(content) for _, content in order]
    for stop in range(20, len(order)):
        if sum(1 for size in code[:stop] if size) == 60 or stop - sum(1 for size in code[:stop] if size) == 300:
            break
        share = sum(code[:stop]) / sum(total[:stop])
        assert abs(share - 0.25) * sum(total[:stop]) <= 3 * 41, "documents of one step come in the order of their ids"
    expected = Counter(d for texts, _ in parts.values() for d in naive_documents(texts, 64, "error"))
    for epoch in (0, 1):
        assert Counter(c for step in whole.steps if step[1] == epoch for c in step[4].values()) == expected


def test_repeating_parts_keep_their_weights_for_ever(tmp_path):
    texts = {"small": [f"s{number}" for number in range(7)], "large": [f"l{number:03}" for number in range(500)]}
    sources = {name: (write_corpus(tmp_path / name, "jsonl", part, num_files=1),) for name, part in texts.items()}
    mixture = tuple({"name": name, "weight": 1.0, "sources": source} for name, source in sources.items())
    config = mixture_config(mixture, mixture_end="repeat", epochs=None)
    whole, resumed = Run(config, delays=False), Run(config, delays=False)
    whole.go_on(1, 60)
    resumed.go_on(2, 31)
    resumed.go_on(1, 29)
    assert resumed.steps == whole.steps
    contents = [content for step in whole.steps for content in step[4].values()]
    tokens = {letter: sum(len(c) for c in contents if c[0] == ord(letter)) for letter in "sl"}
    assert abs(tokens["s"] - tokens["l"]) <= 60
    counts = Counter(content for content in contents if content[0] == ord("s"))
    assert len(counts) == 7
    assert max(counts.values()) - min(counts.values()) <= 2, "a pass has every document once"


def mixture_config(mixture, **changes):
    settings = {"batch_documents": 9, "max_document_tokens": 64, "shuffle_window": 8, "workers": 0}
    return msgspec.convert(settings | {"mixture": mixture} | changes, DataConfig)
