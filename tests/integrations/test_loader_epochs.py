"""Where a `PackedLoader` stands: states that are saved and loaded, iterations, epochs, evaluation."""

from collections import Counter

import pytest

from evenload import PackedLoader
from evenload.errors import ConfigError, DataError
from packed_cases import all_documents, batch_fingerprint, epoch_of_ranks, loader_of, tokens_of, write_texts


@pytest.mark.parametrize("strategy", ["balanced", "wlb"])
def test_batches_after_a_restart_at_every_micro_batch_are_bit_identical(tmp_path, strategy):
    """State inside a step, between steps, at the end of an epoch and of the run."""
    write_texts(tmp_path, num_documents=24)
    settings = {"strategy": strategy, "batch_documents": 6, "epochs": 2, "prefetch_steps": 1}
    loader = loader_of(tmp_path, **settings)
    run, states = [], [(0, loader.state_dict())]
    for _ in range(2):
        for batch in loader:
            run.append(batch_fingerprint(batch))
            states.append((len(run), loader.state_dict()))
        states.append((len(run), loader.state_dict()))
    assert loader.has_ended
    for position, state in states[::3] + states[-2:]:
        resumed = loader_of(tmp_path, **settings)
        resumed.load_state_dict(state)
        assert resumed.state_dict() == state
        rest = []
        while not resumed.has_ended:
            rest += [batch_fingerprint(batch) for batch in resumed]
        assert rest == run[position:]
        assert resumed.epoch == 2


@pytest.mark.parametrize("strategy", ["balanced", "wlb"])
def test_a_state_between_steps_may_be_loaded_with_other_ranks(tmp_path, strategy):
    write_texts(tmp_path, num_documents=24)
    settings = {"strategy": strategy, "batch_documents": 6, "epochs": 1}
    whole = loader_of(tmp_path, **settings)
    steps = whole.steps()
    seen = all_documents(batch for _ in range(2) for batch in next(steps))
    state = whole.state_dict()
    rest = [all_documents(step) for step in steps]
    ranks = [loader_of(tmp_path, rank=rank, world_size=3, **settings) for rank in range(3)]
    for loader in ranks:
        loader.load_state_dict(state)
    if strategy == "balanced":  # its steps hold the same documents whatever the ranks
        together = [
            all_documents(batch for step in parts for batch in step)
            for parts in zip(*(loader.steps() for loader in ranks), strict=True)
        ]
        assert together == rest
    else:
        assert seen + all_documents(batch for loader in ranks for batch in loader) == seen + sum(rest, Counter())


def test_a_state_inside_a_step_needs_equally_many_ranks_and_the_same_plan(tmp_path):
    write_texts(tmp_path)
    loader = loader_of(tmp_path)
    next(iter(loader))
    state = loader.state_dict()
    assert state["given"] == 1
    with pytest.raises(ConfigError, match="saved inside a step, after 1 micro-batch, with 1 rank; now there are 2"):
        loader_of(tmp_path, rank=0, world_size=2).load_state_dict(state)
    other = loader_of(tmp_path, strategy="padded")
    other.load_state_dict(state)
    with pytest.raises(DataError, match="planned anew as"):
        next(iter(other))


def test_states_of_other_data_are_refused(tmp_path):
    write_texts(tmp_path)
    state = loader_of(tmp_path).state_dict()
    with pytest.raises(ConfigError, match="seed: saved with 3, now 4"):
        loader_of(tmp_path, seed=4).load_state_dict(state)
    with pytest.raises(ConfigError, match="not a state of PackedLoader"):
        loader_of(tmp_path).load_state_dict({"epoch": 3})


def test_an_iteration_is_an_epoch_and_one_that_was_left_goes_on(tmp_path):
    texts = Counter(map(tokens_of, write_texts(tmp_path)))
    loader = loader_of(tmp_path)
    first = []
    for batch in loader:
        first.append(batch)
        if len(first) == 3:
            break
    assert loader.epoch == 0
    first += list(loader)
    second = list(loader)
    assert all_documents(first) == texts
    assert all_documents(second) == texts
    assert loader.epoch == 2
    assert list(map(batch_fingerprint, first)) != list(map(batch_fingerprint, second))


def test_set_epoch_reads_that_epoch_and_never_leaves_out_a_rest(tmp_path):
    write_texts(tmp_path)
    straight = loader_of(tmp_path)
    epochs = [list(map(batch_fingerprint, straight)) for _ in range(3)]
    loader = loader_of(tmp_path)
    loader.set_epoch(2)
    batches = []
    for batch in loader:
        loader.set_epoch(2)  # the epoch it is in: nothing happens
        batches.append(batch_fingerprint(batch))
        with pytest.raises(ConfigError, match="in the middle of epoch 2"):
            loader.set_epoch(0)
    # The number of label tokens and all tokens are equal; document ids and step numbers are not part of a batch.
    assert batches == epochs[2]
    loader.set_epoch(1)
    assert list(map(batch_fingerprint, loader)) == epochs[1]
    assert any(line.startswith("trained") and " 80 documents" in line for line in loader.ledger_lines)


def test_evaluation_gives_everything_in_order_every_time(tmp_path):
    texts = write_texts(tmp_path, num_documents=21)
    loader = loader_of(tmp_path, evaluation=True, batch_tokens=90, strategy="padded", shuffle_window=1)
    for _ in range(2):
        steps = [list(step) for step in loader.steps()]
        assert sum((all_documents(step) for step in steps), Counter()).total() == len(texts)
    ranks = epoch_of_ranks(tmp_path, 4, evaluation=True, shuffle_window=1)
    assert len({len(batches) for batches in ranks}) == 1
    assert all_documents(batch for batches in ranks for batch in batches) == Counter(map(tokens_of, texts))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        *(({"overlong": value}, "evaluation leaves nothing out") for value in ("truncate", "drop")),
        *((one, "leaves nothing out") for one in ({"on_corrupt": "skip"}, {"shuffle_window": 8}, {"epochs": 2})),
        *((one, "leave both out") for one in ({"micro_batches": 2}, {"equal_micro_batches": False})),
    ],
)
def test_evaluation_refuses_what_would_leave_something_out(tmp_path, changes, message):
    write_texts(tmp_path)
    with pytest.raises(ConfigError, match=message):
        PackedLoader(str(tmp_path), max_tokens=64, evaluation=True, **changes)
