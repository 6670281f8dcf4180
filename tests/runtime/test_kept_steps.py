"""Steps that ranks keep for survivors: whoever is killed wherever, one step is whole, and it is the last of all."""

import math
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import interrupted
from evenload.errors import CheckpointError
from evenload.runtime.checkpoint import kept_steps, shared_memory
from evenload.runtime.checkpoint.checkpoint import Progress, RunPosition
from evenload.runtime.checkpoint.kept_steps import KeptStep, KeptSteps
from evenload.runtime.checkpoint.pieces import TensorPieces, pieces_of_range, whole_tensor

SHAPES = {"weights.a": (7,), "weights.b": (3, 4), "exp_avg.b": (3, 4)}


def run_until(line: int | None, function, *arguments) -> bool:
    return interrupted.run_until(line, (kept_steps, shared_memory), function, *arguments)


def values(name: str, step: int) -> torch.Tensor:
    """Of a whole tensor after a step: no two elements of any tensors and steps are alike."""
    shape = SHAPES[name]
    first = 10_000 * step + 100 * list(SHAPES).index(name)
    return torch.arange(first, first + math.prod(shape), dtype=torch.float64).view(shape)


def shares(step: int, cuts: dict[str, list[int]], place: int) -> dict[str, TensorPieces]:
    """What the rank at a place has of every tensor: elements from one cut to the next."""
    found = {}
    for name, shape in SHAPES.items():
        edges = [0, *cuts[name], math.prod(shape)]
        start, stop = edges[place], edges[place + 1]
        part = values(name, step).flatten()[start:stop]
        found[name] = TensorPieces(*pieces_of_range(part, start, shape, None))
    return found


def position(step: int) -> RunPosition:
    return RunPosition(progress=Progress(steps_done=step, layout="any"), loader=str(step).encode(), coefficients=None)


def finish(kept: KeptSteps, step: int, cuts: dict[str, list[int]], place: int) -> None:
    """As a rank after its update."""
    kept.write(step, shares(step, cuts, place))
    kept.mark(step, position(step) if place == 0 else None)


def require_whole(found: KeptStep) -> None:
    wanted = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    found.fill((name, whole_tensor(tensor)) for name, tensor in wanted.items())
    for name, tensor in wanted.items():
        assert torch.equal(tensor, values(name, found.steps_done)), f"{name} is of several steps"
    assert found.position().progress.steps_done == found.steps_done
    assert found.position().loader == str(found.steps_done).encode()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # who is killed closes no files
@settings(max_examples=120, deadline=None)
@given(data=st.data(), size=st.integers(1, 4))
def test_whoever_is_killed_wherever_the_last_step_of_all_is_whole(data, size):
    """Rounds of steps; in one of them ranks are killed at any line, and those that are left begin the next round, in
    which more may be killed before they have begun."""
    directory = Path(tempfile.mkdtemp())
    ranks, number, next_step, last_of_all = list(range(size)), 0, 0, None
    try:
        while ranks:
            edges = st.integers(0, 12)
            cuts = {
                name: sorted(min(data.draw(edges), math.prod(shape)) for _ in ranks[1:])
                for name, shape in SHAPES.items()
            }
            kept = {rank: KeptSteps(directory, number, rank, len(ranks)) for rank in ranks}
            killed: set[int] = set()
            for step in range(next_step, next_step + data.draw(st.integers(1, 4))):
                # Nobody is here before all have finished the step before: the norm and the barrier.
                for place, rank in enumerate(ranks):
                    line = data.draw(st.one_of(st.none(), st.none(), st.integers(0, 90)))
                    if not run_until(line, finish, kept[rank], step, cuts, place):
                        killed.add(rank)
                if killed:
                    break
                last_of_all = step
            left = [rank for rank in ranks if rank not in killed]
            ranks, number = left[: data.draw(st.integers(1, size))], number + 1
            lasts = {KeptSteps(directory, number, rank, len(ranks)).last() for rank in ranks}
            if not ranks:
                return
            (found,) = lasts
            if found is None:
                assert last_of_all is None, "all had begun"
                return
            # Whoever is killed behind its mark has finished the step.
            least = 0 if last_of_all is None else last_of_all
            assert found.steps_done in (least, least + (last_of_all is not None))
            require_whole(found)
            # Whoever is killed here is one of the next round, which may lose it before its first step.
            for rank in ranks:
                line = data.draw(st.one_of(st.none(), st.integers(0, 20)))
                run_until(line, KeptSteps(directory, number, rank, len(ranks)).keep_only, found)
            require_whole(found)
            next_step = last_of_all = found.steps_done
            if not killed:
                return
    finally:
        shutil.rmtree(directory)


def test_rounds_go_when_all_have_begun_the_next(tmp_path):
    cuts = {name: [3] for name in SHAPES}
    old = [KeptSteps(tmp_path, 0, rank, 2) for rank in (0, 1)]
    for step in (0, 1):
        for place, kept in enumerate(old):
            finish(kept, step, cuts, place)
    alone = KeptSteps(tmp_path, 1, 1, 1)
    finish(alone, 1, {name: [] for name in SHAPES}, 0)
    assert (tmp_path / "round-0").exists(), "it could be needed until the first step is under way"
    finish(alone, 2, {name: [] for name in SHAPES}, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["round-1"]


@pytest.mark.parametrize("ends_at", ["written", "marked", "second step"])
def test_no_more_than_two_slots_are_there_however_early_rounds_end(tmp_path, ends_at):
    """A third round, after a second one that died behind its first slot, its first mark, or in its second slot."""
    whole = {name: [] for name in SHAPES}

    def begin(number: int) -> KeptSteps:
        kept = KeptSteps(tmp_path, number, 0, 1)
        kept.keep_only(kept.last())
        return kept

    def num_slots() -> int:
        return len(list(tmp_path.rglob("slot-*")))

    def train(kept: KeptSteps, *steps: int) -> None:
        for step in steps:
            finish(kept, step, whole, 0)
            assert num_slots() <= 2

    train(begin(0), 3, 4, 5)
    second = begin(1)
    assert num_slots() == 1
    second.write(5, shares(5, whole, 0))
    if ends_at != "written":
        second.mark(5, position(5))
    if ends_at == "second step":
        second.write(6, shares(6, whole, 0))
    assert num_slots() <= 2
    third = begin(2)
    assert num_slots() == 1
    found = third.last()
    assert found is not None
    require_whole(found)
    train(third, 5, 6, 7)


def test_rounds_that_never_began_go_where_a_checkpoint_is_gone_on_from(tmp_path):
    KeptSteps(tmp_path, 0, 0, 2).write(3, shares(3, {name: [3] for name in SHAPES}, 0))
    later = KeptSteps(tmp_path, 1, 1, 1)
    assert later.last() is None
    later.keep_only(None)
    assert list(tmp_path.iterdir()) == []


def test_another_layout_takes_other_memory(tmp_path):
    """Both slots, one step after the other; a rank may become idle, and come back."""
    kept = [KeptSteps(tmp_path, 0, rank, 2) for rank in (0, 1)]
    halves, alone = {name: [3] for name in SHAPES}, {name: [math.prod(shape)] for name, shape in SHAPES.items()}
    for step, cuts in enumerate((halves, alone, alone, alone, halves, halves)):
        for place, one in enumerate(kept):
            finish(one, step, cuts, place)
        found = KeptSteps(tmp_path, 1, 0, 1).last()
        assert found is not None
        assert found.steps_done == step
        require_whole(found)


def test_memory_of_the_layout_before_goes_before_that_of_the_next_is_taken(tmp_path, monkeypatch):
    """Pages of a removed file stay while it is mapped: a third slot, for which nobody has counted."""
    kept, still_mapped, make = KeptSteps(tmp_path, 0, 0, 1), [], shared_memory.SharedTensors.make

    def noting(self, *arguments):
        maps = Path("/proc/self/maps").read_text().splitlines()
        still_mapped.append([line for line in maps if str(tmp_path) in line and line.endswith("(deleted)")])
        return make(self, *arguments)

    monkeypatch.setattr(shared_memory.SharedTensors, "make", noting)
    for step, edge in enumerate((3, 3, 5)):
        finish(kept, step, {name: [edge] for name in SHAPES}, 0)
    assert still_mapped == [[], [], []]


def test_what_is_lacking_is_an_error(tmp_path):
    kept = KeptSteps(tmp_path, 0, 0, 1)
    kept.write(0, {"weights.a": TensorPieces(*pieces_of_range(torch.zeros(5), 2, (7,), None))})
    kept.mark(0, position(0))
    found = KeptSteps(tmp_path, 1, 0, 1).last()
    assert found is not None
    with pytest.raises(CheckpointError, match=r"after step 0 5 of 7 elements of 'weights\.a' from \[0\] on are kept"):
        found.fill([("weights.a", whole_tensor(torch.zeros(7)))])


def test_an_empty_folder_has_no_step(tmp_path):
    assert KeptSteps(tmp_path, 3, 0, 1).last() is None
