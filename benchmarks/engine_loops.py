"""Engines of engine_steps.py whose loop is in our hands: FSDP2, DeepSpeed, Megatron-Core."""

# pyright: reportMissingImports=false
import contextlib
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch

from engine_turns import RANKS, Race, Train, Trained, loops_by_turns, new_model
from evenload.integrations.packed_loader import PackedLoader

SHIM = Path(__file__).parent.parent / "tests" / "support"
"""Megatron-Core runs on CPUs with what its tests put in CUDA's place."""


def train_fsdp2(race: Race) -> list[Trained]:
    """`fully_shard`, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from evenload.integrations.fsdp2_loop import Fsdp2Loop

    model: Any = new_model(race.config)
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
    return loops_by_turns(race, lambda loader: Fsdp2Loop(model, optimizer, loader))


def deepspeed_trains(stage: int) -> Train:
    """ZeRO of a stage; gradients are summed once a step, under ZeRO-3 after every micro-batch: as its price has it."""

    def train(race: Race) -> list[Trained]:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        import deepspeed.ops

        from evenload.integrations.deepspeed_loop import DeepSpeedLoop

        deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # transfers of its inference: two minutes to compile
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0,  # left out, DeepSpeed clips to a norm of 1
            "zero_allow_untested_optimizer": True,
        }
        model = new_model(race.config)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        return loops_by_turns(race, lambda loader: DeepSpeedLoop(engine, loader, reduce_every_pack=stage == 3))

    return train


def train_megatron(race: Race) -> list[Trained]:
    """Megatron-Core's DistributedDataParallel and optimizer, one stage, two replicas.

    Its optimizer is not the sharded one that the price assumes: that takes tensors on GPUs only.
    """
    sys.path.insert(0, str(SHIM))
    from megatron_shim import megatron_on_cpu

    with megatron_on_cpu(), contextlib.ExitStack() as stack:
        from megatron.core import parallel_state
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
        from megatron.core.models.gpt import GPTModel
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

        from evenload.integrations.megatron_step import MegatronTrainStep, document_layer_spec
        from megatron_case import transformer_config

        parallel_state.initialize_model_parallel()
        stack.callback(parallel_state.destroy_model_parallel)
        llama = race.config
        config = transformer_config(llama, 1, params_dtype=torch.float32)
        torch.manual_seed(0)
        model = GPTModel(
            config, document_layer_spec(config), vocab_size=llama.vocab_size, max_sequence_length=4096,
            share_embeddings_and_output_weights=False, position_embedding_type="rope",
        )  # fmt: skip
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(), model)
        settings = OptimizerConfig(
            optimizer="adam", lr=0.0, min_lr=0.0, clip_grad=0.0, params_dtype=torch.float32
        )  # fmt: skip
        optimizer = get_megatron_optimizer(settings, [wrapped])

        def make_step(loader: PackedLoader) -> MegatronTrainStep:
            return MegatronTrainStep(wrapped, optimizer, loader)

        return loops_by_turns(race, make_step, group=parallel_state.get_data_parallel_group())
