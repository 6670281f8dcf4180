"""Tensors that outlive their process, and folders that do not outlive their owner."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from evenload.errors import ConfigError
from evenload.runtime.checkpoint.shared_directory import SHARED_MEMORY, held_bytes, remove_left_over, shared_directory
from evenload.runtime.checkpoint.shared_memory import SharedTensors, require_room, shared_tensor
from rank_server import rank_context


@pytest.fixture
def folder():
    with shared_directory() as path:
        yield path


def write_and_die(folder: str) -> None:
    tensors = SharedTensors(Path(folder) / "rank-0", "a test")
    tensors.make("layers.0.weight", 5, torch.float64).copy_(torch.arange(5))
    os.kill(os.getpid(), signal.SIGKILL)


def own_and_die(parent: str) -> None:
    with shared_directory(Path(parent)) as path:
        SharedTensors(path / "rank-0", "a test").make("weight", 2048, torch.float32)
        os.kill(os.getpid(), signal.SIGKILL)


def run(function, *arguments) -> int | None:
    process = rank_context().Process(target=function, args=arguments)
    process.start()
    process.join(60)
    return process.exitcode


def test_a_tensor_outlives_the_process_that_wrote_it(folder):
    assert run(write_and_die, str(folder)) == -signal.SIGKILL
    found = shared_tensor(folder / "rank-0", "layers.0.weight")
    assert found is not None
    assert found.tolist() == [0, 1, 2, 3, 4]
    assert found.dtype == torch.float64
    assert [path.name for path in (folder / "rank-0").iterdir()] == ["layers.0.weight.5.float64"]


def test_what_one_writes_the_other_reads(folder):
    mine = SharedTensors(folder / "rank-0", "a test").make("weight", 3, torch.bfloat16)
    theirs = shared_tensor(folder / "rank-0", "weight")
    mine.fill_(2.5)
    assert theirs is not None
    assert theirs.tolist() == [2.5] * 3


def test_a_tensor_made_anew_is_another_and_the_old_one_stays_with_who_has_it(folder):
    tensors = SharedTensors(folder / "rank-0", "a test")
    old = tensors.make("weight", 3, torch.float32).fill_(1.0)
    new = tensors.make("weight", 2, torch.float32)
    assert (old.tolist(), new.tolist()) == ([1.0] * 3, [0.0] * 2)
    assert [path.name for path in tensors.directory.iterdir()] == ["weight.2.float32"]
    found = shared_tensor(tensors.directory, "weight")
    assert found is not None
    assert len(found) == 2
    tensors.drop("weight")
    assert shared_tensor(tensors.directory, "weight") is None


def test_names_that_begin_alike_are_told_apart(folder):
    tensors = SharedTensors(folder / "rank-0", "a test")
    for value, name in enumerate(("layers.1", "layers.11", "layers.1.weight")):
        tensors.make(name, 1, torch.float32).fill_(value)
    found = shared_tensor(tensors.directory, "layers.1")
    assert found is not None
    assert found.tolist() == [0.0]


def test_nothing_takes_no_file(folder):
    tensors = SharedTensors(folder / "rank-0", "a test")
    assert tensors.make("none", 0, torch.float32).numel() == 0
    assert not list(tensors.directory.iterdir())


def test_what_there_is_no_room_for_is_refused_before_anything_is_written(folder):
    with pytest.raises(
        ConfigError, match=r"a test needs 7\.28 TiB of shared memory in .*, where .* are free; give the"
    ):
        SharedTensors(folder / "rank-0", "a test").make("weight", 10**12, torch.float64)
    assert not list((folder / "rank-0").iterdir())
    require_room(folder, 4096, "a test")
    with pytest.raises(ConfigError, match="a test needs 909 TiB"):
        require_room(folder, 10**15, "a test")


def test_pages_are_taken_when_a_tensor_is_made(folder):
    """A lack of memory is an error then, not a bus error later."""
    SharedTensors(folder / "rank-0", "a test").make("weight", 2**18, torch.float32)
    assert held_bytes(folder) >= 2**20


def test_a_folder_goes_with_its_owner():
    with shared_directory() as path:
        assert path.parent == SHARED_MEMORY
        SharedTensors(path / "rank-0", "a test").make("weight", 3, torch.float32)
    assert not path.exists()


def test_what_a_killed_owner_left_is_removed_and_what_a_living_one_has_is_not(tmp_path):
    assert run(own_and_die, str(tmp_path)) == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    with shared_directory(tmp_path) as mine:
        deadline_s = time.monotonic() + 60
        while not (removed := remove_left_over(tmp_path)):  # the kernel gives the lock back when the process is gone
            assert time.monotonic() < deadline_s
        ((path, num_bytes),) = removed
        assert path == left
        assert num_bytes >= 8192
        assert list(tmp_path.iterdir()) == [mine]
        assert remove_left_over(tmp_path) == []


def test_without_shared_memory_there_is_an_error(tmp_path):
    with pytest.raises(ConfigError, match=r"no folder for state in shared memory can be made in .*/none"):
        shared_directory(tmp_path / "none").__enter__()
