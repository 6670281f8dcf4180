"""Every strategy trains every token of the source once an epoch, through loader, planner, exchange and packs."""

import itertools
from collections import Counter, defaultdict

import pytest

from corpus_files import data_config, naive_documents, write_corpus
from cost_samples import sample_coefficients, sample_model
from evenload.data.batches import decode_state, encode_state
from evenload.data.loader import GlobalBatchLoader
from evenload.feed.collate import IGNORE_INDEX, collate_pack
from evenload.feed.step_maker import documents_by_replica, exchange_tokens
from evenload.planning.deferral import DelayState
from evenload.planning.planner import StepPlanner
from evenload.planning.problem import PlanOptions
from evenload.planning.strategies.registry import STRATEGIES
from evenload.stepplan.validate import validate_plan
from evenload.types.layout import even_layout
from evenload.types.plan import decode_plan, encode_plan
from rank_threads import run_ranks

LIMIT = 120


def train(config, strategy, dp, states=None, num_steps=None):
    """Run some steps with `dp` ranks of one stage; (documents by id with the tokens and targets of their slices,
    loader and planner state, ledger)."""
    options, layout = PlanOptions(max_pack_tokens=LIMIT), even_layout(3, dp=dp)
    planner = StepPlanner(sample_model(), sample_coefficients(), layout, None, options, host="unlimited")

    def rank_run(rank, peers):
        loader = GlobalBatchLoader(config, peers=peers)
        saved, delay = states or (None, DelayState())
        if saved is not None:
            loader.load_state(decode_state(saved))
        forward, backward = defaultdict(dict), defaultdict(dict)
        for batch in itertools.islice(iter(loader.next_batch, None), num_steps):
            step, documents = batch.step, batch.carried + batch.documents
            if rank == 0:
                proposal = planner.propose(step, documents, strategy, state=delay, is_last=batch.is_last)
                shared = encode_plan(proposal.require_feasible()), proposal.state
            plan, delay = peers.share(shared if rank == 0 else None)[0]
            plan = decode_plan(plan)
            validate_plan(plan, max_pack_tokens=LIMIT)
            wanted = documents_by_replica(plan)
            table = exchange_tokens(batch, wanted, peers)
            assert sorted(table) == sorted(wanted[rank])
            loader.record_step(batch, plan)
            loader.check_ledger()
            planned = plan.pack_plans[rank]
            for packs, into in ((planned.forward, forward), (planned.backward, backward)):
                for pack in (collate_pack(one, table) for one in packs):
                    for doc, token, target, position in zip(
                        pack.doc_ids.repeat(pack.stops - pack.starts), pack.token_ids, pack.targets, pack.positions,
                        strict=True,
                    ):  # fmt: skip
                        if position < len(table[int(doc)]):
                            assert position not in into[doc]
                            into[doc][position] = (token, target)
        return forward, backward, (encode_state(loader.state()), delay), loader.ledger.state

    results = run_ranks(dp, rank_run)
    documents = {}
    for forward, backward, _, _ in results:
        assert forward == backward, "a token is forwarded and not trained, or the other way round"
        for doc, rows in forward.items():
            # Replicas that share a document have the same rows.
            assert documents.setdefault(doc, rows) == rows
    return documents, results[0][2], results[0][3]


@pytest.mark.parametrize("strategy", [one.name for one in STRATEGIES.values() if not one.changes_layout])
def test_an_epoch_trains_every_token_once_across_a_change_of_ranks(tmp_path, strategy):
    texts = [f"{number % 10}" * (1 + (number * number) % 37 + (80 if number % 11 == 3 else 0)) for number in range(70)]
    config = data_config(
        write_corpus(tmp_path, "jsonl", texts), max_document_tokens=LIMIT, shuffle_window=16, batch_documents=12
    )
    first, states, _ = train(config, strategy, dp=2, num_steps=2)
    rest, _, ledger = train(config, strategy, dp=1 if strategy == "skrull" else 4, states=states)
    assert not set(first) & set(rest), "a document is trained in two steps"
    trained = Counter()
    for rows in (first | rest).values():
        tokens = [int(rows[position][0]) for position in range(len(rows))]
        targets = [int(rows[position][1]) for position in range(len(rows))]
        assert targets == [*tokens[1:], IGNORE_INDEX]
        trained[tuple(tokens)] += 1
    assert trained == Counter(naive_documents(texts, LIMIT, "error"))
    assert ledger.trained == ledger.read
    assert ledger.masked == len(texts), "the first token of every document has no loss"
