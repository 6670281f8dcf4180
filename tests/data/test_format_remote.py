"""Every format over real HTTP and S3 servers, which also fail on purpose."""

import os
import pickle

import fsspec
import pytest

from evenload.data import sources
from evenload.data.part_files import open_reader
from evenload.data.records import FilePart
from evenload.errors import DataError
from format_files import (
    END_ID,
    TOKEN_FORMATS,
    format_config,
    list_files,
    open_source,
    plain,
    read_all,
    tokens_source,
    values_of,
    write_rows,
    write_tokens,
)
from remote_servers import serve_http

DOCUMENTS = [[number % 900 + 1] * (number % 7) + [END_ID] for number in range(400)]
TEXTS = [f"text number {number} " * 20 for number in range(400)]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with serve_http(tmp_path_factory.mktemp("served")) as flaky:
        yield flaky


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(sources, "RETRY_WAITS_S", (0.01, 0.02, 0.03))


def remote_texts(served):
    write_rows(served.root, "jsonl", [{"text": text} for text in TEXTS])
    return open_source(f"{served.url}/rows.jsonl")


@pytest.fixture
def served(server):
    for path in server.root.iterdir():
        path.unlink()
    server.fail("", 0)
    server.has_ranges = True
    return server


def check_some_offsets(reader):
    """All parts, and what is left from one offset on: every one would be many requests."""
    whole = read_all(reader)
    assert values_of(whole) == DOCUMENTS
    assert [plain(record) for record in read_all(reader, 3)] == [plain(r) for r in whole]
    left = reader.records(FilePart(), whole[150].next_offset)
    assert [plain(record) for record in left] == [plain(record) for record in whole[151:]]


@pytest.mark.parametrize("format", TOKEN_FORMATS)
def test_http_files_of_every_format_are_read_in_parts_and_from_offsets(served, format):
    name = os.path.basename(write_tokens(served.root, format, DOCUMENTS))
    reader = tokens_source(f"{served.url}/{name}")
    assert reader.file.size_bytes == (served.root / name).stat().st_size
    check_some_offsets(reader)


@pytest.mark.parametrize("format", TOKEN_FORMATS)
@pytest.mark.parametrize("failure", ["cut", "short", "error"])
def test_connections_that_fail_lose_and_repeat_nothing(served, format, failure):
    name = os.path.basename(write_tokens(served.root, format, DOCUMENTS))
    reader = tokens_source(f"{served.url}/{name}")
    served.fail(failure, 3, good_bytes=40)
    assert values_of(read_all(reader)) == DOCUMENTS
    assert served.num_failures == 0


@pytest.mark.parametrize("format", ["jsonl", "jsonl.gz", "parquet", "file.arrow", "ends.npy", "bin"])
@pytest.mark.parametrize("failure", ["cut", "error"])
def test_a_connection_that_always_fails_is_an_error_that_names_file_and_byte(served, format, failure):
    name = os.path.basename(write_tokens(served.root, format, DOCUMENTS))
    reader = tokens_source(f"{served.url}/{name}")
    served.fail(failure, 1000, good_bytes=0)
    with pytest.raises(DataError, match=rf"127\.0\.0\.1.*/{name[:4]}.* cannot be read at byte \d+: .*tried 4 times"):
        read_all(reader)
    served.fail("", 0)


def test_failures_that_come_again_and_again_are_survived_as_long_as_bytes_arrive(served):
    """The number of attempts bounds a standstill, not the failures of a run of weeks."""
    reader = remote_texts(served)
    served.fail("short", 20, good_bytes=5000)
    assert values_of(read_all(reader)) == TEXTS
    assert served.num_failures == 0


def test_a_server_without_ranges_is_read_from_the_beginning_only(served):
    served.has_ranges = False
    reader = remote_texts(served)
    whole = read_all(reader)
    assert values_of(whole) == TEXTS
    with pytest.raises(DataError, match=r"rows\.jsonl cannot be read at byte \d+: .*appear to support range"):
        list(reader.records(FilePart(), whole[150].next_offset))


def test_a_remote_file_that_vanishes_is_an_error_at_once(served):
    reader = remote_texts(served)
    (served.root / "rows.jsonl").unlink()
    with pytest.raises(DataError, match=r"rows\.jsonl cannot be opened"):
        read_all(reader)


def test_a_remote_file_that_became_shorter_is_an_error(served):
    reader = remote_texts(served)
    content = (served.root / "rows.jsonl").read_bytes()
    (served.root / "rows.jsonl").write_bytes(content[: content.index(b"\n", 70_000) + 1])
    with pytest.raises(DataError, match=r"rows\.jsonl cannot be read at byte 7\d{4}"):
        read_all(reader)


def test_a_part_of_a_large_remote_file_does_not_fetch_what_lies_before_it(served):
    write_rows(served.root, "jsonl", [{"text": "x" * 1000, "row": row} for row in range(16_000)])
    reader = open_source(f"{served.url}/rows.jsonl")
    served.num_bytes_sent = 0
    next(iter(reader.records(FilePart(3, 4))))
    assert served.num_bytes_sent < reader.file.size_bytes / 2


def test_lines_of_a_remote_file_are_named(served):
    reader = remote_texts(served)
    records = read_all(reader)
    assert reader.origin(records[150].offset) == f"{served.url}/rows.jsonl:151"


@pytest.fixture(scope="module")
def bucket():
    from moto.server import ThreadedMotoServer

    moto = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    moto.start()
    host, port = moto.get_host_and_port()
    settings = {"ENDPOINT_URL": f"http://{host}:{port}", "DEFAULT_REGION": "us-east-1"}
    settings |= {"ACCESS_KEY_ID": "testing", "SECRET_ACCESS_KEY": "testing"}
    with pytest.MonkeyPatch.context() as patch:
        for key, value in settings.items():
            patch.setenv(f"AWS_{key}", value)
        filesystem = fsspec.filesystem("s3", skip_instance_cache=True)
        filesystem.mkdir("corpus")
        yield filesystem
        type(filesystem).clear_instance_cache()
        moto.stop()


@pytest.mark.parametrize("format", TOKEN_FORMATS)
def test_s3_files_of_every_format_are_read_in_parts_and_from_offsets(bucket, tmp_path, format):
    write_tokens(tmp_path, format, DOCUMENTS)
    for path in tmp_path.iterdir():
        bucket.put_file(str(path), f"corpus/{format}/deep/{path.name}")
    bucket.invalidate_cache()
    config = format_config(f"s3://corpus/{format}", record="tokens", document_end_id=END_ID)
    (file,) = list_files(config)
    check_some_offsets(pickle.loads(pickle.dumps(open_reader(file, config))))


def test_s3_text_files_and_globs_are_listed_in_order(bucket, tmp_path):
    for name in ("b.txt", "a.txt", "c.md"):
        (tmp_path / name).write_text(name)
        bucket.put_file(str(tmp_path / name), f"corpus/texts/{name}")
    bucket.invalidate_cache()
    config = format_config("s3://corpus/texts/*.txt")
    files = list_files(config)
    result = [read_all(open_reader(file, config))[0].values for file in files]
    assert result == [("a.txt",), ("b.txt",)]
