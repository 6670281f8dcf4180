"""The file of a run: what is wrong in it is said with what was probably meant."""

from pathlib import Path

import pytest

from evenload.config.keys import OTHER_NAMES, require_known, setting_paths
from evenload.config.train_config import TrainConfig, load_train_config
from evenload.errors import ConfigError

CONFIG = """
[model]
path = "model"
[data]
sources = ["corpus"]
max_document_tokens = 1024
batch_documents = 6
[train]
output_dir = "run"
steps = 5
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    file = tmp_path / "config.toml"
    file.write_text(CONFIG)
    return file


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.dtype=bf16", "model.dtype is 'bf16'; did you mean 'bfloat16'? choices: float32, bfloat16, float64"),
        ("train.device=gpu", "train.device is 'gpu'; did you mean 'cuda'? choices: cpu, cuda"),
        ("data.overlong=trunc", "data.overlong is 'trunc'; did you mean 'truncate'? choices: error, split"),
        ("data.record=message", "data.record is 'message'; did you mean 'messages'?"),
        ("plan.options.slimpack.cuts=symetric", "plan.options.slimpack.cuts is 'symetric'; did you mean 'symmetric'?"),
        (
            "plan.options.cuts=symmetric",
            "unknown configuration key 'plan.options.cuts'; did you mean 'plan.options.slimpack.cuts'?",
        ),
        ("plan.options.wlb.relase=queues", "did you mean 'plan.options.wlb.release'?"),
        ("plan.options.wlb.outlier_queues=0", "wlb.outlier_queues is 0, must be at least 1"),
        ("plan.options.wlb.outlier_queues=many", "'plan.options.wlb.outlier_queues' must be a whole number"),
        ("plan.options.strategies=[]", "unknown configuration key 'plan.options.strategies'"),
        ("plan.options=3", "configuration key 'plan.options' must be a table, is a whole number"),
        ("train.steps=many", "'train.steps' must be a whole number or left out, is a text"),
        ("model.random_init=1", "'model.random_init' must be true or false, is a whole number"),
        ("data.sources=docs", "'data.sources' must be a list, is a text"),
        ("data.sources=[1]", "'data.sources[0]' must be a text, is a whole number"),
        ("batch_documents=3", "is not of the form section.key=value, such as data.batch_documents=3"),
        ("train.on_failed_checkpoint=ignore", "choices: stop, continue"),
        ("optimizer.lr=1e-3", "unknown configuration key 'optimizer.lr'; did you mean 'optimizer.learning_rate'?"),
        ("model.dtype=fp32", "did you mean 'float32'?"),
        ("plan.options.outlier_queues=3", "did you mean 'plan.options.wlb.outlier_queues'?"),
        ("plan.options.policy=recomputation", "did you mean 'recompute'?"),
        ("parallel.cp_exchange=allgather", "did you mean 'all_gather'?"),
        ("optimizer.gradient_clipping=1", "did you mean 'optimizer.clip_norm'?"),
        ("data.max_seq_length=4096", "did you mean 'data.max_document_tokens'?"),
        ("train.warmup_steps=10", "did you mean 'optimizer.warmup_steps'?"),
        ("model.lora={rnak=3}", "unknown configuration key 'model.lora.rnak'; did you mean 'model.lora.rank'"),
        ("train.batch_size=8", "did you mean 'data.batch_documents'?"),
        ("train.bf16=true", "did you mean 'model.dtype'?"),
        ("model.lora.r=8", "did you mean 'model.lora.rank'?"),
        ("data.mixture=[{name='a', weight=1, sources=['x'], wieght=2}]", "'data.mixture[0].wieght'; did you mean"),
        ("lr=1e-3", "is not of the form section.key=value, such as optimizer.learning_rate=1e-3"),
        ("plan.options.backend='python'", "'plan.options.backend' is gone: the compiled core alone plans; remove it"),
        ("train.on_lost_rank=shrink", "'train.on_lost_rank' is gone: torchrun with --max-restarts starts the ranks"),
        ("log.profile_steps=[1, 2]", "'log.profile_steps' is gone: a callback can run torch's profiler"),
        ("samples.every_steps=5", "'samples' is gone: the exported model writes text, in any program that loads it"),
        ("plan.feedback=true", "'plan.feedback' is gone: plans do not follow the speed of single ranks; remove it"),
        ("training.steps=5", "unknown configuration key 'training'; did you mean 'train'?"),
    ],
)
def test_what_is_wrong_is_said_with_what_was_meant(config_file, override, message) -> None:
    with pytest.raises(ConfigError) as error:
        load_train_config(config_file, [override])
    assert message in str(error.value)


def test_names_of_other_trainers_lead_to_settings_that_exist_and_are_none_of_ours_in_that_section() -> None:
    paths = set(setting_paths(TrainConfig))
    assert set(OTHER_NAMES.values()) <= paths
    for name, ours in OTHER_NAMES.items():
        assert f"{ours.rpartition('.')[0]}.{name}" not in paths, f"{name} is a setting of that section"


def test_a_word_with_free_text_beside_its_choices_is_left_to_its_own_check() -> None:
    require_known({"train": {"attention": "anything"}}, TrainConfig)


@pytest.mark.parametrize(
    "setting",
    [
        'plan.layouts=["pp=1"]',
        "plan.strategy=flexpipe",
        "plan.options.auto.time_budget_s=1.0",
        "train.recalibrate=true",
    ],
)
def test_deterministic_runs_plan_by_their_data_alone(config_file: Path, setting: str) -> None:
    name = setting.partition("=")[0].replace("plan.strategy", "flexpipe")
    with pytest.raises(ConfigError, match=rf"train.deterministic is set, and with .*{name}.* measured seconds"):
        load_train_config(config_file, ["train.deterministic=true", setting])
    assert load_train_config(config_file, ["train.deterministic=true"]).train.deterministic


def test_missing_keys_are_named_with_all_that_a_run_needs(tmp_path) -> None:
    file = tmp_path / "run.toml"
    for text, missing in (("", "model"), ("[model]\n[data]\n[train]", "model.path"), ("[model]\npath = 'a'", "data")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"^configuration key '{missing}' is missing; a run needs model.path, "):
            load_train_config(file)


def test_a_file_that_is_no_text_is_said_to_be_none(tmp_path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xff\xfe[model]")
    with pytest.raises(ConfigError, match=r"run.toml is no text in UTF-8 \(invalid start byte\); give a TOML file"):
        load_train_config(file)
