"""Steps of Megatron-Core with the packs that its users make and with ours, for `engine_steps.py`; on CPU processes, by
the tests' shim.

    best_fit    fixed-token packing into as many micro-batches on every replica, as Megatron's own packing has it
    balanced    equal predicted time; every replica as many micro-batches as its documents need
    auto        the fastest of all strategies that Megatron-Core runs, by this engine's price
"""

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from evenload.cost.coefficients import read_coefficients
from evenload.cost.pack_cost import PackCosts
from evenload.data.config import DataConfig
from evenload.engines.catalog import engine_named
from evenload.engines.price import engine_price
from evenload.integrations.engines.megatron_attention import document_layer_spec
from evenload.integrations.engines.megatron_step import MegatronTrainStep
from evenload.integrations.packed_loader import PackedLoader
from evenload.types.hf_config import model_from_hf_config
from evenload.types.layout import even_layout
from loader_training import CONTEXT, tiny_config
from megatron_case import transformer_config
from megatron_shim import megatron_on_cpu

VARIANTS: dict[str, dict[str, Any]] = {
    "best_fit": {"strategy": "best_fit", "equal_micro_batches": True},
    "balanced": {"strategy": "balanced"},
    "auto": {"strategy": "auto"},
}
Step = tuple[float, int, float, float]
"""Seconds on this rank, label tokens and loss of the global batch, predicted seconds."""


def setup(directory: Path, batch_documents: int) -> dict[str, Iterator[Step]]:
    """Steps by variant, on this rank, which train the same global batches with the same weights at learning rate 0.

    Args:
        directory: with `documents.bin`, `documents.idx` and `cost.json`.
    """
    with megatron_on_cpu():
        model, optimizer = _model()
    return {name: _steps(directory, batch_documents, model, optimizer, settings) for name, settings in VARIANTS.items()}


def _model() -> tuple[torch.nn.Module, Any]:
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    parallel_state.initialize_model_parallel()
    llama = tiny_config()
    torch.manual_seed(0)
    config = transformer_config(llama, stages=1, params_dtype=torch.float32)
    spec = document_layer_spec(config)
    model = GPTModel(
        config, spec, llama.vocab_size, CONTEXT, share_embeddings_and_output_weights=llama.tie_word_embeddings,
        position_embedding_type="rope",
    )  # fmt: skip
    wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=0.0, min_lr=0.0, clip_grad=0.0), [wrapped])
    return wrapped, optimizer


def _steps(
    directory: Path, batch_documents: int, model: torch.nn.Module, optimizer: Any, settings: dict[str, Any]
) -> Iterator[Step]:
    from megatron.core import parallel_state

    llama, cost_file = tiny_config(), directory / "cost.json"
    source = DataConfig(
        sources=(str(directory / "documents.bin"),), format="memmap", record="tokens", seed=1,
        batch_documents=batch_documents, max_document_tokens=CONTEXT, workers=0,
    )  # fmt: skip
    loader = PackedLoader(
        source, max_tokens=CONTEXT, model=llama, engine="megatron", costs=str(cost_file),
        group=parallel_state.get_data_parallel_group(), **settings,
    )  # fmt: skip
    train_step = MegatronTrainStep(model, optimizer, loader)
    spec = model_from_hf_config(llama.to_dict(), "llama")
    costs = PackCosts(spec, read_coefficients(cost_file), even_layout(spec.num_layers, dp=dist.get_world_size()))
    for step in loader.steps():
        price = engine_price(step.plan, engine_named("megatron"), costs)
        with megatron_on_cpu():
            start_s = time.perf_counter()
            report = train_step(step)
            seconds = time.perf_counter() - start_s
        yield seconds, report.num_label_tokens, report.loss, price.step_time_s
