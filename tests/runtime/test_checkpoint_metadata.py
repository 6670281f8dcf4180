"""The index of a checkpoint is read without running anything, and says in words what is wrong with it."""

import os
import pickle
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

import evenload
from evenload.errors import ConfigError
from evenload.runtime.checkpoint.directory import skipped_checkpoints
from evenload.runtime.checkpoint.pieces import read_metadata


def index(file: str = "__0_0.distcp") -> Metadata:
    """An index of one tensor."""
    size = torch.Size([2, 3])
    stored = TensorStorageMetadata(
        properties=TensorProperties.create_from_tensor(torch.zeros(2, 3, dtype=torch.bfloat16)),
        size=size,
        chunks=[ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=size)],
    )
    at = MetadataIndex("model.weight", torch.Size([0, 0]), 0)
    return Metadata({"model.weight": stored}, storage_data={at: _StorageInfo(file, 0, 24)})


class Planted:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.mkdir, (self.marker,)


@pytest.mark.parametrize("inside", [False, True])
def test_a_planted_pickle_does_not_run(tmp_path, inside):
    marker = tmp_path / "ran"
    planted = Planted(str(marker))
    content = index()
    if inside:
        content.planner_data = planted
    (tmp_path / ".metadata").write_bytes(pickle.dumps(content if inside else planted))
    with pytest.raises(ConfigError, match=r"\.metadata is no index of tensors, it asks for 'posix\.mkdir'"):
        read_metadata(tmp_path)
    assert not marker.exists()


@pytest.mark.parametrize("file", ["../other/__0_0.distcp", "/etc/passwd"])
def test_an_index_may_not_point_elsewhere(tmp_path, file):
    (tmp_path / ".metadata").write_bytes(pickle.dumps(index(file)))
    with pytest.raises(ConfigError, match=f"it names the file '{file}' outside of the checkpoint"):
        read_metadata(tmp_path)


def test_a_missing_or_damaged_index_is_told_in_words(tmp_path):
    whole = pickle.dumps(index())
    for content in (None, b"", whole[:50], b"garbage"):
        if content is not None:
            (tmp_path / ".metadata").write_bytes(content)
        with pytest.raises(ConfigError, match=r"cannot be read: \.metadata is missing or damaged .* the one before"):
            read_metadata(tmp_path)
    (tmp_path / ".metadata").write_bytes(pickle.dumps({"a": 1}))
    with pytest.raises(ConfigError, match="it holds a dict"):
        read_metadata(tmp_path)


def test_incomplete_directories_are_named_where_they_would_have_been_taken(tmp_path):
    for step in (1, 2, 3):
        (tmp_path / f"step-{step:08d}").mkdir()
    (tmp_path / ".step-00000004.partial").mkdir()
    (tmp_path / "step-00000002" / "progress.json").write_text("{}")
    (line,) = skipped_checkpoints(tmp_path, tmp_path / "step-00000002")
    assert line.startswith(f"{tmp_path / 'step-00000003'} is not a complete checkpoint (no progress.json")
    assert line.endswith("going on from step-00000002")
    (tmp_path / "step-00000002" / "progress.json").unlink()
    lines = skipped_checkpoints(tmp_path, None)
    assert len(lines) == 3
    assert all(line.endswith("starting from the beginning") for line in lines)


def test_nothing_else_reads_pickles():
    """But a worker process, from the one that started it, and DeepSpeed's loop, what DeepSpeed unpickles next."""
    sources = Path(evenload.__file__).parent
    pattern = re.compile(r"pickle\.loads?\(|torch\.load\(|allow_pickle=True|weights_only=False|Unpickler\(")
    result = {
        file.relative_to(sources).as_posix() for file in sources.rglob("*.py") if pattern.search(file.read_text())
    }
    assert result == {*("data/workers.py", "runtime/checkpoint/pieces.py"), "integrations/deepspeed_loop.py"}
