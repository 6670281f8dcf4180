"""Training runs whose ranks share documents: equal to runs without, resumable under other layouts."""

import math
from pathlib import Path

import pytest

from dist_training import shared_steps
from training_cases import write_training_config

STEPS = 3


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    """A tiny Llama in float64 on documents of which a few are twenty times the others."""
    texts = ("word " * (60 if i % 9 == 4 else 1 + (i * 7) % 4) for i in range(40))
    return write_training_config(tmp_path, texts, num_layers=4)


def losses(pool, config_file: Path, name: str, *, sharing: int = 1, **settings) -> list[float]:
    """Of a run in which some slice is really shared by so many ranks."""
    parallel = {key: settings.pop(key) for key in ("dp", "cp", "pp") if key in settings}
    overrides = ["data.max_document_tokens=320", "data.batch_documents=9", "plan.options.max_pack_tokens=320"]
    overrides += [f"train.steps={STEPS}", *(f"parallel.{key}={size}" for key, size in parallel.items())]
    overrides += [f"{key}={value}" for key, value in settings.pop("more", {}).items()]
    overrides.append(f"train.output_dir={config_file.parent / name}")
    steps = pool.run(math.prod(parallel.values()), shared_steps, str(config_file), overrides, STEPS)[0]
    assert max(ranks for _, ranks in steps) == sharing
    return [loss for loss, _ in steps]


def test_runs_that_share_documents_equal_runs_that_do_not(gloo_pool, config_file):
    """The same batches, losses and updates as one process, to 1e-9, in a pipeline and by both exchanges."""
    balanced = {"plan.strategy": "balanced"}
    alone = losses(gloo_pool, config_file, "alone", more=balanced)
    assert len(set(alone)) == STEPS
    apart = {"plan.options.dp_merge": "false"}  # on by default
    runs = {
        "skrull": {"sharing": 2, "cp": 2, "more": {"plan.strategy": "skrull"}},
        "adaptive": {"sharing": 2, "cp": 2, "pp": 2, "more": {"plan.options.cp_sharding": "adaptive", **balanced}},
        "ring": {"sharing": 3, "cp": 3, "more": {"plan.strategy": "slimpack", "parallel.cp_exchange": "ring"}},
        "per_document": {"sharing": 2, "cp": 2, "dp": 2, "more": {"plan.options.cp_sharding": "per_document", **apart}},
        "slimpack": {"sharing": 2, "dp": 2, "pp": 2, "more": {"plan.strategy": "slimpack"}},
        "auto": {"sharing": 4, "dp": 4, "more": {"plan.strategy": "auto"}},
    }
    for name, settings in runs.items():
        assert losses(gloo_pool, config_file, name, **settings) == pytest.approx(alone, rel=1e-9), name
