"""Evenload: train large language models fast on documents of very different lengths.

    comparison = evenload.plan("lengths.npy", model="llama3-8b", cluster="h100x32")  # a Comparison; needs no torch
    run = evenload.train("config.toml", callbacks=[...])                             # a TrainedRun
    parts = evenload.micro_batches(lengths, ranks=8, max_tokens=32_768)               # for a trainer of one's own
    loader = evenload.PackedLoader("corpus", tokenizer="model", max_tokens=8192)     # for a loop of one's own
    trainer = evenload.PackedTrainer(model, args, train_loader=loader)               # or PackedSFTTrainer
    print(evenload.check_isolation(model, batch))                                    # is anybody's packing leaking?
    packer = evenload.TreePacker(max_tokens=16_384, model=model)                     # shared prefixes computed once

Names are imported at their first use, because planning does not need torch.
"""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from evenload.errors import needs_train_extra

if TYPE_CHECKING:
    from evenload.cli.comparison import Comparison
    from evenload.cli.plan import plan
    from evenload.cli.train import TrainedRun, train
    from evenload.integrations.callback import Callback
    from evenload.integrations.isolation import Isolation, check_isolation
    from evenload.integrations.packed_loader import PackedLoader
    from evenload.integrations.trainer import PackedTrainer
    from evenload.integrations.trainer import PackedTrainer as PackedSFTTrainer
    from evenload.integrations.tree_attention import tree_attention
    from evenload.integrations.tree_packer import TreeBatch, TreePacker
    from evenload.planning.micro_batches import Cost, MicroBatches, micro_batches


__all__ = [
    "Callback",
    "Comparison",
    "Cost",
    "Isolation",
    "MicroBatches",
    "PackedLoader",
    "PackedSFTTrainer",
    "PackedTrainer",
    "TrainedRun",
    "TreeBatch",
    "TreePacker",
    "__version__",
    "check_isolation",
    "micro_batches",
    "plan",
    "train",
    "tree_attention",
]

__version__: str


_MODULES = {
    "Callback": "evenload.integrations.callback",
    "Comparison": "evenload.cli.comparison",
    "Cost": "evenload.planning.micro_batches",
    "MicroBatches": "evenload.planning.micro_batches",
    "TrainedRun": "evenload.cli.train",
    "micro_batches": "evenload.planning.micro_batches",
    "plan": "evenload.cli.plan",
    "train": "evenload.cli.train",
}


_TRAINING = {
    **{"PackedLoader": "packed_loader", "PackedTrainer": "trainer", "PackedSFTTrainer": "trainer"},
    **{"Isolation": "isolation", "check_isolation": "isolation"},
    **{"TreeBatch": "tree_packer", "TreePacker": "tree_packer", "tree_attention": "tree_attention"},
}


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(import_module(_MODULES[name]), name)
    if name in _TRAINING:
        with needs_train_extra(f"evenload.{name}"):
            module = import_module(f"evenload.integrations.{_TRAINING[name]}")
        return module.packed_sft_trainer() if name == "PackedSFTTrainer" else getattr(module, name)
    if name == "__version__":
        from importlib.metadata import version

        return version("evenload")
    raise AttributeError(f"module 'evenload' has no attribute '{name}'")


def __dir__() -> list[str]:
    # help() imports all that is named here, and these need packages that planning does without.
    can_load = all(map(find_spec, ("torch", "transformers")))
    return [name for name in __all__ if can_load or name not in _TRAINING]
