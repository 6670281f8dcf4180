"""Files much larger than what a reader may hold, read by a process whose memory is measured."""

import numpy as np
import pyarrow as pa
import pytest

from format_files import printed_by, write_megatron_index, write_table

FILE_BYTES = 128 << 20
MOST_BYTES = 80 << 20

READ = """
import sys
sys.path[:0] = sys.argv[1].split(":")
from format_files import open_source
from evenload.data.records import FilePart

def resident_bytes(field):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(field))

column = sys.argv[4]
kind = {"text": "text", "input_ids": "tokens"}[column]

def read(source):
    reader = open_source(source, record=kind, document_end_id=0)
    total = 0
    for record in reader.records(FilePart()):
        assert record.values is not None, record.problem
        total += len(record.values[0])
    return total

read(sys.argv[2])  # imports and pools
before = resident_bytes("VmRSS")
total = read(sys.argv[3])
print(resident_bytes("VmHWM") - before, total)
"""


def write_big(root, format, file_bytes):
    root.mkdir()
    if format in ("bin", "ends.npy"):
        num_rows, row_tokens = file_bytes // 4 // 4096, 4096
        ids = np.arange(1, num_rows * row_tokens + 1, dtype=np.int32).reshape(num_rows, row_tokens)
        if format == "bin":
            write_megatron_index(root / "big", [row_tokens] * num_rows, list(range(num_rows + 1)), "int32")
            ids.tofile(root / "big.bin")
            return str(root / "big.bin"), "input_ids", ids.size
        ids[:, -1] = 0
        np.save(root / "big.npy", ids.reshape(-1))
        return str(root / "big.npy"), "input_ids", ids.size
    num_rows, row_bytes = file_bytes >> 10, 1 << 10
    texts = np.random.default_rng(0).integers(97, 123, num_rows * row_bytes, dtype=np.uint8)
    if format == "jsonl":
        with open(root / "big.jsonl", "wb") as sink:
            for row in texts.reshape(num_rows, row_bytes):
                sink.write(b'{"text": "' + row.tobytes() + b'"}\n')
    else:
        edges = pa.py_buffer(np.arange(num_rows + 1, dtype=np.int32) * row_bytes)
        column = pa.StringArray.from_buffers(num_rows, edges, pa.py_buffer(texts))
        # One row group, and one record batch: nothing but pages bounds what is read.
        write_table(root / f"big.{format}", format, pa.table({"text": column}), num_rows)
    return str(root / f"big.{format}"), "text", num_rows * row_bytes


@pytest.mark.parametrize("format", ["jsonl", "parquet", "stream.arrow", "bin", "ends.npy"])
def test_memory_does_not_grow_with_the_file(tmp_path, format):
    small, *_ = write_big(tmp_path / "small", format, 1 << 16)
    big, column, total = write_big(tmp_path / "big", format, FILE_BYTES)
    grown, read = map(int, printed_by(READ, small, big, column).split())
    assert read == total
    assert grown < MOST_BYTES, f"{grown >> 20} MiB more for a file of {FILE_BYTES >> 20} MiB"
