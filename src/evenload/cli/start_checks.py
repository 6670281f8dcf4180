"""`require_runnable`: settings that do not go together are refused here, once, before processes start.

Each rule stands beside what it protects, where it is asked again when the run builds its parts (under torchrun
processes have started already): strategies and their options (`plan.strategies`), tensor parallelism and architectures
(`runtime.model.tensor_weights`), ring and windows (`runtime.replay.context_ring`), layers and stages (`types.layout`),
tokeniser and model (`config.tokenizer`), a cost file and what it was measured on (`cost.coverage`), sources
and what their files hold (`data.reading.part_files`). tests/support/matrix.py lists the pairs; all others are trained
in tests/dist/test_matrix.py.
"""

import msgspec

from evenload.attention.backends import select_backend
from evenload.config.layouts import layouts_of, require_optimizer
from evenload.config.sections import validation_data
from evenload.config.tokenizer import require_tokenizer
from evenload.config.train_config import TrainConfig
from evenload.cost.coefficients import read_coefficients
from evenload.cost.coverage import require_covered
from evenload.data.config import mixture_configs
from evenload.data.reading.part_files import open_part
from evenload.errors import ConfigError
from evenload.hub.hub_files import local_path
from evenload.plan.strategies.registry import require_layouts, require_trainable
from evenload.runtime.model.configured import load_config, model_spec
from evenload.runtime.model.export_files import require_same_ids
from evenload.runtime.model.hf_model import require_model
from evenload.runtime.model.supported import attention_soft_cap
from evenload.runtime.model.tensor_weights import require_tensor_parallel
from evenload.runtime.replay.context_ring import require_no_window
from evenload.runtime.stages.evaluation import require_whole_model
from evenload.types.layout import ParallelLayout


def require_runnable(config: TrainConfig) -> ParallelLayout:
    """The layout in which a run starts whose settings go together; the error says which do not, and why."""
    hf_config = load_config(config.model.path)
    require_tensor_parallel(hf_config, config.parallel.tp)
    spec = model_spec(config)
    layouts = layouts_of(config, spec.num_layers)
    layout = layouts[0]
    require_layouts(config.plan.strategy, layout, len(layouts))
    require_optimizer(config, spec, len(layouts))
    require_whole_model(config, layouts)
    _require_use_of_twins(config, layouts)
    options = msgspec.structs.replace(config.plan.options, max_pack_tokens=config.max_pack_tokens)
    for one in layouts:
        require_trainable(config.plan.strategy, one, options, config.data.max_document_tokens)
    if config.train.cost_file is not None:
        file = config.train.cost_file
        require_covered(read_coefficients(file), spec, layout, f"train.cost_file {file}")
    if config.parallel.cp_exchange == "ring":
        require_no_window(max(spec.windows))
    tokenizer = require_tokenizer(
        config.data, model_path=config.model.path, random_init=config.model.random_init, vocab_size=spec.vocab_size
    )
    require_same_ids(tokenizer)
    config.optimizer.rate(
        config.optimizer.warmup_steps, config.train.steps
    )  # a function of the user's is found and runs
    if config.train.device == "cpu":  # a GPU's kernels are asked on the GPU
        select_backend(config.train.attention, "cpu", attention_soft_cap(hf_config))
    for part in mixture_configs(config.data):
        open_part(part)
    if config.validation is not None:
        for part in mixture_configs(validation_data(config.data, config.validation)):
            open_part(part)
    weights = None if config.model.random_init else local_path(config.model.path, "model.path", "weights")
    require_model(hf_config, weights)
    return layout


def _require_use_of_twins(config: TrainConfig, layouts: tuple[ParallelLayout, ...]) -> None:
    """Refuse a budget without effect as the user wrote it; a run that lost all but one of its layouts keeps it."""
    if config.plan.twin_bytes is not None and len(layouts) == 1:
        raise ConfigError(
            f"plan.twin_bytes is {config.plan.twin_bytes}, but the run takes one layout, {layouts[0].describe()}, so "
            "nothing moves between layouts and nothing is shared; leave it out, or declare others in plan.layouts"
        )
