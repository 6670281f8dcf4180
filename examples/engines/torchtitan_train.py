"""torchtitan's trainer with Evenload's packs: a small random Llama learns this repository's documentation.

    torchrun --nproc-per-node 2 examples/engines/torchtitan_train.py        # two CPU processes
    torchrun --nproc-per-node 8 examples/engines/torchtitan_train.py --tokens 65536 --longest 8192   # eight GPUs

Run again with more --steps and the same --output, it goes on from the last checkpoint, also with another number of
ranks. torchtitan's own command takes `configuration` as well:

    torchrun ... -m torchtitan.train --module torchtitan_train --config configuration

Needs `pip install '.[torchtitan]'`. Without a GPU `torchtitan_on_cpu` makes torchtitan's model train on CPUs.
"""

import argparse
import sys
from pathlib import Path

import torch

if not torch.cuda.is_available():
    sys.path.insert(0, str(Path(__file__).parent))
    import torchtitan_on_cpu
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, default_adamw
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.llama3 import model_registry
from torchtitan.tools.logging import init_logger
from torchtitan.trainer import Trainer

from evenload.data.tokenize import train_byte_pair_tokenizer
from evenload.integrations.torchtitan_trainer import packed_config

DOCS = Path(__file__).parents[2] / "docs"


def configuration(data=DOCS, output=Path("runs/torchtitan"), steps=10, tokens=8192, longest=1024):
    """A `PackedTrainer.Config`: torchtitan's, and what our loader reads."""
    assets = output / "assets"
    if not (assets / "tokenizer.json").exists():  # torchtitan's trainer wants one
        assets.mkdir(parents=True, exist_ok=True)
        texts = [path.read_text() for path in sorted(Path(data).glob("*.md"))]
        train_byte_pair_tokenizer(texts, 2048, assets / "tokenizer.json")
    config = Trainer.Config(
        model_spec=model_registry("debugmodel", attn_backend="varlen"),
        hf_assets_path=str(assets),
        dump_folder=str(output),
        loss=ChunkedLossWrapper.Config(loss_fn=CrossEntropyLoss.Config()),
        optimizer=default_adamw(lr=1e-3),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=2, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=1,
            seq_len=longest,
            steps=steps,
            disable_cuda_graphs=True,
            # Products of bfloat16 take CPUs many times as long.
            mixed_precision_param="bfloat16" if torch.cuda.is_available() else "float32",
        ),
        # torchtitan's default, "spmd_types", asks more of `fully_shard` than PyTorch 2.13 has.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        checkpoint=CheckpointManager.Config(enable=True, interval=5, last_save_model_only=False),
    )
    loader = {"data": str(data), "include": ["*.md"], "overlong": "split", "batch_tokens": tokens}
    packed = packed_config(config, loader)
    return packed if torch.cuda.is_available() else torchtitan_on_cpu.on_cpu(packed)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=DOCS)
    parser.add_argument("--output", type=Path, default=Path("runs/torchtitan"))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=8192, help="of a step, over all ranks")
    parser.add_argument("--longest", type=int, default=1024, help="tokens of a pack")
    init_logger()
    trainer = configuration(**vars(parser.parse_args())).build()
    try:
        trainer.train()
    finally:
        trainer.dataloader.close()
        trainer.close()
        torch.distributed.destroy_process_group()
