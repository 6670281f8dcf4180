"""Checkpoints written while training goes on: what they hold; what cannot be written, or was changed later."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from checkpoint_cases import (
    random_numbers_after_resume,
    resume_error,
    save_while_everything_changes,
    steps_resumed_from,
    train_with_a_full_disk,
    written_and_predicted_bytes,
)
from dist_training import train_steps
from evenload.config.sections import RunConfig
from evenload.config.train_config import load_train_config
from evenload.errors import ConfigError
from evenload.runtime.checkpoint.directory import complete_checkpoints, latest_checkpoint, prune_checkpoints
from evenload.runtime.checkpoint.writer import require_room
from evenload.types.text import format_bytes
from small_run import write_small_run

STEPS = 5
LAYOUT = ["parallel.pp=2", "parallel.dp=2"]


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A tiny Llama in float32, on short documents."""
    settings = f"""
        max_document_tokens = 256
        batch_documents = 6
        [optimizer]
        learning_rate = 1e-2
        [train]
        steps = {STEPS}
    """
    return write_small_run(tmp_path, (f"document {i} " * (1 + (i * 7) % 5) for i in range(30)), settings, tied=True)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_in_the_background_holds_its_own_step(gloo_pool, config_file, tmp_path):
    """Loader, planner and tensors of a checkpoint on the way are those of its step, not of the end."""
    every = [*LAYOUT, "train.checkpoint_every_steps=1", "train.keep_checkpoints=0"]
    whole = gloo_pool.run(4, train_steps, str(config_file), every, STEPS)[0]
    written = tmp_path / "run" / "checkpoints"
    assert names(written) == [f"step-{step:08d}" for step in range(1, STEPS + 1)]
    again = tmp_path / "from-2"
    shutil.copytree(written / "step-00000002", again / "checkpoints" / "step-00000002")
    rest = gloo_pool.run(4, train_steps, str(config_file), [*every, f"train.output_dir={again}"], STEPS)[0]
    assert whole[2:] == rest


def test_what_changes_after_the_copy_is_not_written(gloo_pool, config_file):
    """The writing of rank 0 is held up, by rank 1 that has not begun, until everything it saved is other."""
    more = ["parallel.pp=2", "model.dtype=bfloat16"]
    assert gloo_pool.run(2, save_while_everything_changes, str(config_file), more)[0] == []


def test_all_ranks_go_on_from_the_checkpoint_that_rank_0_sees(gloo_pool, config_file, tmp_path):
    """One of another step would be loaded without an error: every rank reads its own stage."""
    every = ["parallel.pp=2", "train.checkpoint_every_steps=1", "train.keep_checkpoints=0"]
    gloo_pool.run(2, train_steps, str(config_file), every, 2)
    late, early = tmp_path / "run", tmp_path / "early"
    shutil.copytree(late, early)
    shutil.rmtree(early / "checkpoints" / "step-00000002")
    assert gloo_pool.run(2, steps_resumed_from, str(config_file), every, [str(early), str(late)]) == [1, 1]


def test_replicas_write_every_parameter_once(gloo_pool, config_file, tmp_path):
    """Four replicas together write no more than one alone, up to the format's own bytes per tensor."""
    sizes = []
    for dp in (1, 4):
        here = [f"parallel.dp={dp}", f"train.output_dir={tmp_path / str(dp)}"]
        gloo_pool.run(dp, train_steps, str(config_file), here, 1)
        saved = tmp_path / str(dp) / "checkpoints" / "step-00000001"
        sizes.append([path.stat().st_size for path in saved.glob("*.distcp")])
    assert len(sizes[1]) == 4
    assert sum(sizes[1]) < 1.3 * sum(sizes[0])
    assert max(sizes[1]) < 0.5 * sum(sizes[0])


def test_old_checkpoints_go_only_after_a_new_one_is_complete(gloo_pool, config_file, tmp_path):
    more = [*LAYOUT, "train.checkpoint_every_steps=1", "train.keep_checkpoints=2"]
    gloo_pool.run(4, train_steps, str(config_file), more, STEPS)
    assert names(tmp_path / "run" / "checkpoints") == ["step-00000004", "step-00000005"]


def test_a_full_disk_stops_the_run_and_leaves_the_checkpoint_before(gloo_pool, config_file, tmp_path):
    """RLIMIT_FSIZE on one of four ranks: the operating system refuses its bytes, all ranks stop with the same error."""
    more = [*LAYOUT, "train.checkpoint_every_steps=1"]
    ranks = gloo_pool.run(4, train_with_a_full_disk, str(config_file), more, 3, 2, STEPS + 1)
    directory = tmp_path / "run" / "checkpoints"
    messages = {message for _, _, message in ranks}
    assert len(messages) == 1
    (message,) = messages
    for part in ("step-0000000", str(directory), "MB are free", "rank 3", "File too large", "is intact", "Free space"):
        assert part in message, message
    intact = latest_checkpoint(directory)
    assert intact is not None
    assert names(directory) == [path.name for path in complete_checkpoints(directory)]
    assert str(intact) in message
    rest = gloo_pool.run(4, train_steps, str(config_file), LAYOUT, STEPS)[0]
    whole = gloo_pool.run(4, train_steps, str(config_file), [*LAYOUT, f"train.output_dir={tmp_path}/whole"], STEPS)[0]
    assert rest == whole[int(intact.name.split("-")[1]) :]


@pytest.mark.parametrize(
    "more",
    [
        ["parallel.pp=2"],
        ["parallel.dp=2", "model.dtype=bfloat16"],
        ["parallel.tp=2", "train.ema_decay=0.9"],
        ["parallel.dp=2", "model.dtype=bfloat16", "optimizer.moments=bfloat16"],
        ["parallel.pp=2", "model.lora={rank=2}"],
        ["parallel.pp=2", "optimizer.name=muon"],
    ],
    ids=str,
)
def test_the_bytes_of_a_checkpoint_are_known_before(gloo_pool, config_file, more):
    """To the byte, of a tied embedding on two ranks too; with Muon, whose matrices have one moment, at least."""
    ranks = gloo_pool.run(2, written_and_predicted_bytes, str(config_file), more)
    written, (predicted, _) = sum(one for one, _ in ranks), {one for _, one in ranks} | {None}
    if "optimizer.name=muon" in more:
        assert 0.8 * written < predicted < written
    else:
        assert predicted == written


GB = 2**30


@pytest.mark.parametrize(
    ("settings", "free_gb", "there_gb", "needed"),
    [
        ({}, 39, 0, "40.0 GiB: 4 of 10.0 GiB"),
        ({}, 40, 0, ""),
        ({}, 20, 20, ""),  # three are there already, say
        ({}, 20, 19, "40.0 GiB: 4 of 10.0 GiB"),
        ({"keep_best": 2}, 59, 0, "60.0 GiB: 6 of 10.0 GiB"),
        ({"keep_checkpoints": 1}, 20, 0, ""),
        ({"keep_checkpoints": 1}, 19, 0, "20.0 GiB: 2 of 10.0 GiB"),
        ({"keep_checkpoints": 0}, 10, 0, ""),  # how many there will be is not known
        ({"keep_checkpoints": 0}, 9, 0, "10.0 GiB: 1 of 10.0 GiB"),
        ({"steps": 2}, 20, 0, ""),
        ({"steps": 100, "checkpoint_every_steps": 60}, 20, 0, ""),
        ({"steps": 100, "checkpoint_every_steps": 60}, 19, 0, "20.0 GiB: 2 of 10.0 GiB"),
        ({"steps": 100, "checkpoint_every_s": 0}, 10, 0, ""),  # the one at the end
        ({"steps": 100, "checkpoint_every_s": 0}, 9, 0, "10.0 GiB: 1 of 10.0 GiB"),
    ],
)
def test_room_for_the_checkpoints_that_are_kept_is_there_at_the_start(
    tmp_path, monkeypatch, settings, free_gb, there_gb, needed
):
    directory, asked = tmp_path / "run" / "checkpoints" / "step-00000001", []
    if there_gb:
        directory.mkdir(parents=True)
        with (directory / "__0_0.distcp").open("wb") as file:
            file.truncate(there_gb * GB)
    usage = SimpleNamespace(free=free_gb * GB)
    monkeypatch.setattr("shutil.disk_usage", lambda place: asked.append(place) or usage)
    run = RunConfig(output_dir=str(tmp_path / "run"), **settings)
    if not needed:
        require_room(run, 10 * GB)
    else:
        with pytest.raises(ConfigError, match="Keep fewer, save less often") as refused:
            require_room(run, 10 * GB)
        for words in (f"train.output_dir is {tmp_path}/run, where {format_bytes(free_gb * GB)} are free", needed):
            assert words in str(refused.value)
    assert asked == [directory.parent if there_gb else tmp_path], "the nearest directory that exists"


def test_training_goes_on_past_a_failed_checkpoint_where_it_is_told_to(gloo_pool, config_file, tmp_path):
    more = [*LAYOUT, "train.checkpoint_every_steps=1", "train.on_failed_checkpoint=continue"]
    ranks = gloo_pool.run(4, train_with_a_full_disk, str(config_file), more, 0, 2, 4)
    failures, losses, error = ranks[0]
    assert error == ""
    assert len(losses) == STEPS
    assert 1 <= len(failures) <= 2
    assert all("File too large" in failure for failure in failures)
    assert latest_checkpoint(tmp_path / "run" / "checkpoints") == tmp_path / "run" / "checkpoints" / "step-00000005"


def test_the_last_checkpoint_has_to_succeed(gloo_pool, config_file):
    more = [*LAYOUT, "train.on_failed_checkpoint=continue"]
    ranks = gloo_pool.run(4, train_with_a_full_disk, str(config_file), more, 1, 1, STEPS + 1)
    for _, _, error in ranks:
        assert "there is no earlier one" in error


def test_random_states_and_cost_file_come_back(gloo_pool, config_file):
    for expected, result, has_costs in gloo_pool.run(2, random_numbers_after_resume, str(config_file), LAYOUT[1:]):
        assert result == expected
        assert has_costs


def test_what_does_not_belong_together_is_refused(gloo_pool, config_file, tmp_path):
    """Steps edited, a directory renamed, a loader state of another step, damaged tensors."""
    gloo_pool.run(1, train_steps, str(config_file), [], 2)
    saved = tmp_path / "run" / "checkpoints" / "step-00000002"

    def error_of(change, steps: int = 2) -> str:
        other = tmp_path / "other"
        shutil.rmtree(other, ignore_errors=True)
        copy = other / "checkpoints" / f"step-{steps:08d}"
        shutil.copytree(saved, copy)
        change(copy)
        return gloo_pool.run(1, resume_error, str(config_file), [f"train.output_dir={other}"])[0]

    def edit(name: str, **changes):
        def change(copy: Path) -> None:
            content = json.loads((copy / name).read_text()) | changes
            (copy / name).write_text(json.dumps(content))

        return change

    def cut(copy: Path) -> None:
        (file,) = copy.glob("*.distcp")
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])

    assert error_of(lambda copy: None) == ""
    edited = error_of(edit("progress.json", steps_done=400))
    assert "progress.json tells of 400 steps, its name says 2" in edited
    renamed = error_of(edit("progress.json", steps_done=400), steps=400)
    assert "progress.json tells of 400 steps, its tensors say 2" in renamed
    assert "loader.json is not the one that progress.json belongs to" in error_of(edit("loader.json", step=1))
    assert "is damaged or does not fit the configured model: rank 0" in error_of(cut)


def complete(directory: Path, *steps: int) -> None:
    for step in steps:
        (directory / f"step-{step:08d}").mkdir(parents=True)
        (directory / f"step-{step:08d}" / "progress.json").write_text("{}")


def test_pruning_counts_complete_checkpoints_only_and_keeps_the_newest(tmp_path):
    complete(tmp_path, 1, 2, 9, 100_000_000)
    (tmp_path / "step-00000010").mkdir()  # no progress.json: not complete, and not ours to delete
    (tmp_path / "step-of-mine").mkdir()
    prune_checkpoints(tmp_path, 2)
    assert [path.name for path in complete_checkpoints(tmp_path)] == ["step-00000009", "step-100000000"]
    assert (tmp_path / "step-00000010").is_dir()
    prune_checkpoints(tmp_path, 0)
    assert len(complete_checkpoints(tmp_path)) == 2
    prune_checkpoints(tmp_path, 1)
    assert latest_checkpoint(tmp_path) == tmp_path / "step-100000000"
    assert (tmp_path / "step-of-mine").is_dir()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("train.keep_checkpoints=-1", r"train.keep_checkpoints is -1, must be 0 \(keep all\) or more"),
        ("train.checkpoint_timeout_s=0", "train.checkpoint_timeout_s is 0"),
        ("train.on_failed_checkpoint=ignore", "on_failed_checkpoint"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused(config_file, setting, message):
    with pytest.raises(ConfigError, match=message):
        load_train_config(config_file, [setting])
