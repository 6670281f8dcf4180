"""What ranks of the tests of torchtitan run: its own `train()`, with what it trained written down.

Imports torchtitan, so only tests of `make test-engines` import it.
"""

import os
import sys
from dataclasses import dataclass, fields, replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, distribute_tensor

from engine_records import EngineCase, Perturbed, RankRecord, TrainOrder, documents_of_pack, perturb_by_hand

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "engines"))
from torchtitan_on_cpu import on_cpu  # noqa: I001  before torchtitan
from torchtitan.components.checkpoint import CheckpointManager
from torchtitan.components.dataloader import DataloaderExhaustedError
from torchtitan.components.loss import ChunkedLossWrapper, CrossEntropyLoss
from torchtitan.components.metrics import MetricsProcessor
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import ParallelismConfig, TrainingConfig
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry
from torchtitan.trainer import Trainer

from evenload.data.tokenize import train_byte_pair_tokenizer
from evenload.integrations import torchtitan_trainer
from evenload.integrations.torchtitan_trainer import PackedDataLoader, PackedTrainer, packed_config

# Tests take these from here, because torchtitan must not be imported before `torchtitan_on_cpu`.
__all__ = ["DataloaderExhaustedError", "PackedDataLoader", "ScaledDotProductAttention", "torchtitan_trainer"]

LONGEST = 128
CHUNKS = 4


class SgdContainer(OptimizersContainer):
    """Plain SGD, so that weights tell the gradient; torchtitan has Adam and Muon only."""

    @dataclass(kw_only=True, slots=True)
    class Config(OptimizersContainer.Config):
        pass

    @staticmethod
    def _resolve_optimizer_factory(name):
        return {"SGD": torch.optim.SGD}[name]


def tiny_spec():
    """torchtitan's Llama of tests, two layers of it."""
    spec = model_registry("debugmodel", attn_backend="varlen")
    spec.model.layers = spec.model.layers[:2]
    return spec


def trainer_config(folder, data, *, chunked=False, learning_rate=0.5, **loader):
    """A trainer of two layers in float32, without clipping."""
    loss = CrossEntropyLoss.Config()
    group = ParamGroupConfig(pattern=".*", optimizer_name="SGD", optimizer_kwargs={"lr": learning_rate})
    config = Trainer.Config(
        model_spec=tiny_spec(),
        hf_assets_path=str(Path(folder, "assets")),
        dump_folder=str(folder),
        loss=ChunkedLossWrapper.Config(num_chunks=CHUNKS, loss_fn=loss) if chunked else loss,
        optimizer=SgdContainer.Config(param_groups=[group], implementation="for-loop"),
        lr_scheduler=LRSchedulersContainer.Config(warmup_steps=0, decay_ratio=0.0),
        training=TrainingConfig(
            local_batch_size=1,
            seq_len=LONGEST,
            max_norm=1e9,
            steps=1_000_000,
            mixed_precision_param="float32",
            disable_cuda_graphs=True,
        ),
        # Its default, "spmd_types", asks more of `fully_shard` than PyTorch 2.13 has.
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        metrics=MetricsProcessor.Config(log_freq=1, disable_color_printing=True),
        activation_checkpoint=None,
    )
    settings = {"data": str(data), "tokenizer": "bytes", "batch_documents": 8, "workers": 0, "seed": 3}
    return on_cpu(packed_config(config, settings | {"shuffle_window": 16} | loader))


def write_tokenizer(config):
    """The one that torchtitan's trainer wants to be there."""
    train_byte_pair_tokenizer(["a small text"], 280, Path(config.hf_assets_path, "tokenizer.json"))


def titan_reference():
    """The model in float64 with the weights that `build_trainer` begins with."""
    torch.manual_seed(0)
    config = tiny_config()
    model = config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    return model.double()


def tiny_config():
    """The model's configuration as torchtitan's trainer leaves it: attention of CPUs, a short rotary table."""
    config = trainer_config("unused", "unused")
    config.model_spec.model.update_from_config(config=config)
    return config.model_spec.model


class RecordingTrainer(PackedTrainer):
    """Writes down what it trains."""

    @dataclass(kw_only=True, slots=True)
    class Config(PackedTrainer.Config):
        pass

    record: RankRecord
    keep_gradients = False

    def train_step(self, data_iterator):
        super().train_step(data_iterator)
        step = self.dataloader._step
        self.record.documents.append([document for pack in step.packs for document in documents_of_pack(pack)])


def build_trainer(config) -> RecordingTrainer:
    """A trainer with the reference's weights; inside a process group."""
    os.environ.setdefault("LOCAL_RANK", str(dist.get_rank()))
    torch.autograd.set_multithreading_enabled(False)  # as torchtitan does where it starts the process group
    write_tokenizer(config)
    values = {name: getattr(config, name) for name in (one.name for one in fields(config))}
    trainer = RecordingTrainer.Config(**values).build()
    weights = dict(titan_reference().named_parameters())
    with torch.no_grad():
        for name, parameter in trainer.model_parts[0].named_parameters():
            whole = weights[name].to(parameter.dtype)
            if isinstance(parameter, DTensor):
                whole = distribute_tensor(whole, parameter.device_mesh, parameter.placements)
            parameter.copy_(whole)
    return trainer


def train(case: EngineCase, order: TrainOrder) -> RankRecord:
    """torchtitan's own `train()`."""
    folder = order.load_from or order.save_to or order.corpus.parent / "titan"
    loader = case.loader | ({} if order.num_steps else {"epochs": 1})
    config = trainer_config(folder, order.corpus, learning_rate=order.learning_rate, **case.engine, **loader)
    if order.num_steps is not None:
        config.training.steps = order.num_steps
    if order.save_to is not None:
        config.checkpoint = CheckpointManager.Config(enable=True, interval=order.save_after)
    if order.load_from is not None:
        saved = min(int(path.name.partition("-")[2]) for path in (order.load_from / "checkpoint").glob("step-*"))
        config.checkpoint = CheckpointManager.Config(enable=True, load_step=saved, load_only=True)
        config.training.steps += saved
    trainer = build_trainer(config)
    record = trainer.record = RankRecord(trainer.dataloader.loader.rank)
    trainer.metrics_processor.log = lambda step, loss, *_, **__: record.losses.append(loss)
    if order.keep_gradients:
        update = trainer.optimizers.step

        def keep_and_update(*arguments):
            record.gradients.append(_whole({name: one.grad for name, one in _parameters(trainer)}))
            update(*arguments)

        trainer.optimizers.step = keep_and_update
    trainer.train()
    record.parameters = _whole(dict(_parameters(trainer)))
    trainer.dataloader.close()
    trainer.close()
    return record


def perturb(case: EngineCase, corpus: Path) -> Perturbed | None:
    """The model's outputs as torchtitan calls it."""
    trainer = build_trainer(trainer_config(corpus.parent / "titan", corpus, **case.engine, **case.loader))
    return perturb_by_hand(_Forward(trainer))


class _Forward:
    """As much of an `EngineRun` as `perturb_by_hand` asks for."""

    def __init__(self, trainer):
        self.trainer, self.loader = trainer, trainer.dataloader.loader

    def logits(self, batch):
        inputs = {name: batch[0][name] for name in ("input", "positions")}
        tokens, _, settings = self.trainer.post_dataloading_process(inputs, batch[1])
        with torch.no_grad(), self.trainer.train_context():
            return self.trainer.model_parts[0](tokens, **settings)[0]


def _parameters(trainer):
    return list(trainer.model_parts[0].named_parameters())


def _whole(tensors):
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in tensors.items()
    }


# In float32 the error of a larger rate grows from step to step.
TITAN = EngineCase(train=train, perturb=perturb, reference=titan_reference, learning_rate=0.1)
CHUNKED = replace(TITAN, engine={"chunked": True})
