"""Engines of engine_steps.py whose loop is in our hands: FSDP2, DeepSpeed."""

# pyright: reportMissingImports=false
import os
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine_turns import RANKS, VARIANTS, Train, Trained, by_turns, loop_steps, new_model
from evenload.integrations.packed_loader import PackedLoader
from loader_training import tiny_config


def train_fsdp2(directory: Path, turns: Sequence[str]) -> list[Trained]:
    """`fully_shard`, layer by layer."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from evenload.integrations.engines.fsdp2_loop import Fsdp2Loop

    model: Any = new_model(tiny_config())
    mesh = init_device_mesh("cpu", (RANKS,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)

    def make_loop(loader: PackedLoader) -> Fsdp2Loop:
        return Fsdp2Loop(model, optimizer, loader)

    return by_turns({one: loop_steps(directory, "fsdp2", tiny_config(), one, make_loop) for one in VARIANTS}, turns)


def deepspeed_trains(stage: int) -> Train:
    """ZeRO of a stage; gradients are summed once a step, under ZeRO-3 after every micro-batch: as its price has it."""

    def train(directory: Path, turns: Sequence[str]) -> list[Trained]:
        os.environ["DS_ACCELERATOR"] = "cpu"
        import deepspeed
        import deepspeed.ops

        from evenload.integrations.engines.deepspeed_loop import DeepSpeedLoop

        deepspeed.ops.__compatible_ops__ = defaultdict(bool)  # transfers of its inference: two minutes to compile
        deepspeed.init_distributed(dist_backend="gloo", auto_mpi_discovery=False, verbose=False)
        config = {
            "train_micro_batch_size_per_gpu": 1,
            "zero_optimization": {"stage": stage},
            "gradient_clipping": 0.0,  # left out, DeepSpeed clips to a norm of 1
            "zero_allow_untested_optimizer": True,
        }
        model = new_model(tiny_config())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0)
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config, dist_init_required=False)
        name = "deepspeed" if stage == 1 else f"deepspeed-zero{stage}"

        def make_loop(loader: PackedLoader) -> DeepSpeedLoop:
            return DeepSpeedLoop(engine, loader, reduce_every_pack=stage == 3)

        return by_turns({one: loop_steps(directory, name, tiny_config(), one, make_loop) for one in VARIANTS}, turns)

    return train
