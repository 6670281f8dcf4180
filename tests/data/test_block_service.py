"""What reads in the background dies, stalls or fails: recovery or one clear error, never a hang, nothing lost."""

import contextlib
import gc
import os
import signal
import time
from pathlib import Path

import msgspec
import pytest

from corpus_files import all_batches, data_config, fingerprint_of, write_corpus
from evenload.data import workers as data_workers
from evenload.data.loader import GlobalBatchLoader
from evenload.errors import ConfigError, DataError
from odd_tokenizers import BuggyTokenizer, DeadlyTokenizer, LargeTokenizer, LateTokenizer, SlowTokenizer
from rank_threads import run_ranks
from remote_servers import serve_http

TEXTS = [f"{'word ' * (number % 13)}{number}" for number in range(300)]


def worker_pids(loader):
    return [worker.process.pid for worker in loader.background._workers]


def wait_until_gone(pids):
    deadline_s = time.monotonic() + 120
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        assert time.monotonic() < deadline_s, f"workers {pids} still run"
        time.sleep(0.02)


def test_a_killed_worker_is_replaced_and_nothing_is_lost_or_repeated(tmp_path):
    root = write_corpus(tmp_path, "jsonl", TEXTS)
    config = data_config(root, shuffle_window=64, batch_documents=11, max_document_tokens=200, workers=2)
    expected = [fingerprint_of(batch) for batch in all_batches(GlobalBatchLoader(config))]
    loader = GlobalBatchLoader(config)
    batches = []
    while (batch := loader.next_batch()) is not None:
        batches.append(fingerprint_of(batch))
        if len(batches) in (1, 2, 9):
            for pid in worker_pids(loader):
                # It may just have been replaced by itself: its predecessor's death is noticed in another thread.
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    assert batches == expected


def test_a_worker_that_dies_again_and_again_is_an_error_with_its_exit_code(tmp_path):
    root = write_corpus(tmp_path, "jsonl", ["fine", "poison"], num_files=1)
    config = data_config(root, workers=1, shuffle_window=1)
    with pytest.raises(DataError, match=r"died 4 times .* exit code 9.*data\.workers = 0"):
        GlobalBatchLoader(config, DeadlyTokenizer()).next_batch()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_stalled_reader_is_an_error_that_names_the_file(tmp_path, workers):
    root = write_corpus(tmp_path, "jsonl", ["slow"] * 3, num_files=1)
    loader = GlobalBatchLoader(data_config(root, workers=workers, stall_timeout_s=0.5), SlowTokenizer())
    with pytest.raises(DataError, match=r"nothing for 0\.5 s.*0\.jsonl.*stall_timeout_s"):
        loader.next_batch()


def test_a_server_that_stops_answering_is_an_error_that_names_the_file(tmp_path):
    """Even where starting the worker takes longer than the server may."""
    (tmp_path / "docs.jsonl").write_text('{"text": "a"}\n' * 9)
    with serve_http(tmp_path) as server:
        server.fail("hang", 100)
        config = data_config(f"{server.url}/docs.jsonl", workers=1, stall_timeout_s=1.5, record="text")
        loader = GlobalBatchLoader(config, LateTokenizer(2.0))
        with pytest.raises(DataError, match=r"nothing for 1\.5 s.*docs\.jsonl"):
            loader.next_batch()
        loader.close()
        with pytest.raises(
            DataError, match=r"nothing for 1\.5 s, reading the first records of .*docs\.jsonl; .*stall_t"
        ):
            GlobalBatchLoader(msgspec.structs.replace(config, record="auto"))
        server.released.set()


def test_a_worker_that_never_starts_is_an_error_that_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(data_workers, "START_TIMEOUT_S", 0.5)
    root = write_corpus(tmp_path, "jsonl", ["a"])
    loader = GlobalBatchLoader(data_config(root, workers=1, stall_timeout_s=0.1), LargeTokenizer())
    with pytest.raises(DataError, match=r"worker 0 has not started within 0\.5 s.*data\.workers = 0"):
        loader.next_batch()
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_an_unexpected_failure_arrives_with_its_cause(tmp_path, workers):
    root = write_corpus(tmp_path, "jsonl", ["a"])
    loader = GlobalBatchLoader(data_config(root, workers=workers), BuggyTokenizer())
    with pytest.raises(DataError, match=r"(?s)failed unexpectedly.*a bug"):
        loader.next_batch()


def test_an_error_on_one_rank_reaches_every_rank(tmp_path):
    write_corpus(tmp_path, "jsonl", TEXTS[:40], num_files=4)
    (tmp_path / "2.jsonl").write_text('{"text": "ok"}\n{"text"\n')
    config = data_config(str(tmp_path), shuffle_window=16, streams=4)

    def run(rank, peers):
        # Closed here: left to the garbage collector, files of other ranks' readers are a warning in a later test.
        loader = GlobalBatchLoader(config, peers=peers)
        with contextlib.closing(loader), pytest.raises(DataError, match=r"2\.jsonl:2"):
            all_batches(loader)
        return True

    assert run_ranks(3, run) == [True] * 3


def test_a_closed_loader_has_no_file_open_while_the_error_lives(tmp_path):
    """The error's traceback holds the reader, which reads other streams too."""
    write_corpus(tmp_path, "jsonl", TEXTS[:40], num_files=4)
    (tmp_path / "2.jsonl").write_text('{"text": "ok"}\n{"text"\n')
    loader = GlobalBatchLoader(data_config(str(tmp_path), shuffle_window=16, streams=4))
    with pytest.raises(DataError, match=r"2\.jsonl:2") as error:
        all_batches(loader)
    assert open_files(tmp_path)
    (worker,) = loader.background._workers
    loader.close()
    worker._thread.join(60)
    assert error.value.__traceback__ is not None
    assert not open_files(tmp_path)


def open_files(folder):
    links = [os.path.realpath(link) for link in Path("/proc/self/fd").iterdir()]
    return [link for link in links if link.startswith(f"{folder}/")]


def test_what_cannot_be_sent_to_a_worker_is_refused_with_the_way_out(tmp_path):
    class Local(DeadlyTokenizer):
        pass

    root = write_corpus(tmp_path, "jsonl", ["a"])
    with pytest.raises(ConfigError, match=r"data\.workers = 0"):
        GlobalBatchLoader(data_config(root, workers=1), Local()).next_batch()
    assert GlobalBatchLoader(data_config(root, workers=0), Local()).next_batch() is not None


@pytest.mark.parametrize("how", ["close", "drop", "end"])
def test_no_worker_outlives_its_loader(tmp_path, how):
    loader = GlobalBatchLoader(data_config(write_corpus(tmp_path, "jsonl", TEXTS), max_document_tokens=99, workers=2))
    loader.next_batch()
    pids = worker_pids(loader)
    assert len(pids) == 2
    if how == "close":
        loader.close()
    elif how == "end":
        all_batches(loader)
    else:
        del loader
        gc.collect()
    wait_until_gone(pids)


def test_a_closed_loader_goes_on_where_it_was(tmp_path):
    config = data_config(write_corpus(tmp_path, "jsonl", TEXTS), max_document_tokens=99, workers=1)
    whole, closed = GlobalBatchLoader(config), GlobalBatchLoader(config)
    expected = [fingerprint_of(batch) for batch in all_batches(whole)]
    batches = []
    for batch in iter(closed.next_batch, None):
        batches.append(fingerprint_of(batch))
        if len(batches) % 20 == 3:
            closed.close()
    assert batches == expected
