"""Trainer, TRL and Accelerate as engines of the conformance suite (`engine_conformance`)."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import peft
import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformers import Trainer, TrainerCallback

from engine_records import EngineCase, Perturbed, RankRecord, TrainOrder, perturb_by_hand, small_model, train_by_hand
from evenload.integrations.engine_loop import model_inputs
from evenload.integrations.trainer import PackedTrainerMixin
from packed_cases import documents_of
from trainer_cases import arguments

MICRO_BATCHES = 2
ADAPTER = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", init_lora_weights=False, lora_dropout=0.0)


class Recording:
    """Writes down what a Trainer trains; put before `PackedTrainerMixin`."""

    def get_batch_samples(self, *arguments):
        samples, count = super().get_batch_samples(*arguments)
        if samples:  # none at the end of an epoch
            self.record.documents.append([document for batch in samples for document in documents_of(batch)])
            self.record.losses.append(0.0)
        return samples, count

    def compute_loss(self, *arguments, **settings):
        loss = super().compute_loss(*arguments, **settings)
        # The Trainer multiplies by the processes, because gradients are averaged over them.
        self.record.losses[-1] += loss.item() / self.accelerator.num_processes
        return loss


class RecordingTrainer(Recording, PackedTrainerMixin, Trainer):
    """transformers' own."""


class KeepGradients(TrainerCallback):
    """Gradients before the optimizer's step, after the sum over ranks."""

    def __init__(self, record: RankRecord) -> None:
        self.record = record

    def on_pre_optimizer_step(self, args, state, control, model, **_):
        named = trained(model.module if hasattr(model, "module") else model)
        self.record.gradients.append({name: one.grad.clone() for name, one in named})


def trained(model):
    return [(name, one) for name, one in model.named_parameters() if one.requires_grad]


def as_launched() -> None:
    """The environment that torchrun gives, for Accelerate, which shall not remember the case before."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    rank, world_size = str(dist.get_rank()), str(dist.get_world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


def build_trainer(case: EngineCase, order: TrainOrder, output: Path, **changes):
    """A trainer of this rank, with the reference's weights."""
    as_launched()
    settings = {"gradient_accumulation_steps": MICRO_BATCHES, "learning_rate": order.learning_rate, **changes}
    kind = case.engine["kind"]
    if kind == "trainer":
        trainer_class, args, further = RecordingTrainer, arguments(output, **settings), {}
    else:
        # Importing TRL takes seconds.
        from hf_tokenizer import some_tokenizer
        from trl_cases import RecordingSFTTrainer, sft_arguments

        trainer_class, args = RecordingSFTTrainer, sft_arguments(output, **settings)
        further = {"processing_class": some_tokenizer()}
        if kind == "lora":
            further["peft_config"] = ADAPTER
    loader = case.open_loader(order.corpus, micro_batches=MICRO_BATCHES)
    trainer = trainer_class(small_model(), args, train_loader=loader, **further)
    weights = dict(case.reference().named_parameters())
    with torch.no_grad():
        for name, parameter in trained(trainer.model):
            parameter.copy_(weights[name])
    trainer.record = RankRecord(loader.rank)
    return trainer


def train(case: EngineCase, order: TrainOrder) -> RankRecord:
    """The Trainer's own `train()`."""
    epoch = case.open_loader(order.corpus, rank=0, world_size=1, epochs=1)
    num_steps = order.num_steps or len(list(epoch.steps()))
    saved = "" if order.load_from is None else next(order.load_from.glob("checkpoint-*"))
    changes = {"max_steps": num_steps + (int(saved.name.partition("-")[2]) if saved else 0)}
    if order.save_to is not None:
        changes |= {"save_strategy": "steps", "save_steps": order.save_after, "save_total_limit": None}
    output = order.save_to or order.load_from or order.corpus.parent / "output"
    trainer = build_trainer(case, order, output, **changes)
    if order.keep_gradients:
        trainer.add_callback(KeepGradients(trainer.record))
    if order.save_to is not None:
        trainer.add_callback(SaveOnce(order.save_after))
    trainer.train(resume_from_checkpoint=str(saved) if saved else None)
    return finish(trainer)


class SaveOnce(TrainerCallback):
    """One checkpoint only."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **_):
        control.should_save = state.global_step == self.step


def finish(trainer) -> RankRecord:
    """The record, its losses summed over ranks."""
    record = trainer.record
    losses = torch.tensor(record.losses, dtype=torch.float64)
    dist.all_reduce(losses)
    record.losses = losses.tolist()
    record.parameters = {name: one.detach().clone() for name, one in trained(trainer.model)}
    trainer._train_loader.close()
    return record


def perturb(case: EngineCase, corpus: Path) -> Perturbed | None:
    """The model's outputs as the Trainer calls it."""
    trainer = build_trainer(case, TrainOrder(corpus, 0.0), corpus.parent / "output", max_steps=1)
    return perturb_by_hand(_Forward(trainer))


class _Forward:
    """As much of an `EngineRun` as `perturb_by_hand` asks for."""

    def __init__(self, trainer) -> None:
        self.trainer, self.loader = trainer, trainer._train_loader

    def logits(self, batch):
        with torch.no_grad():
            return self.trainer.model(**self.trainer._prepare_inputs(model_inputs(batch))).logits[0]


class AccelerateRun:
    def __init__(self, case: EngineCase, corpus: Path, learning_rate: float) -> None:
        as_launched()
        self.accelerator = Accelerator(cpu=True)
        model = small_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=learning_rate)
        self.loader = case.open_loader(corpus)
        self.model, self.optimizer = self.accelerator.prepare(model, optimizer)
        self.accelerator.register_for_checkpointing(self.loader)

    @property
    def plain(self):
        return self.accelerator.unwrap_model(self.model)

    def accumulate(self, step):
        total = torch.zeros((), dtype=torch.float64)
        for index, batch in enumerate(step):
            is_last = index == len(step) - 1
            with contextlib.nullcontext() if is_last else self.accelerator.no_sync(self.model):
                loss = self.model(**batch).loss
                self.accelerator.backward(loss * self.accelerator.num_processes)
            total += loss.item()
        return self.accelerator.reduce(total, "sum").item()

    def gradients(self):
        return {name: one.grad for name, one in self.plain.named_parameters()}

    def update(self):
        self.optimizer.step()
        self.optimizer.zero_grad()

    def parameters(self):
        return dict(self.plain.named_parameters())

    def logits(self, batch):
        return self.plain(**model_inputs(batch)).logits[0]

    def save(self, directory):
        self.accelerator.save_state(str(directory))

    def load(self, directory):
        self.accelerator.load_state(str(directory))


def train_with_accelerate(case: EngineCase, order: TrainOrder) -> RankRecord:
    return train_by_hand(AccelerateRun(case, order.corpus, order.learning_rate), order)


def perturb_with_accelerate(case: EngineCase, corpus: Path) -> Perturbed | None:
    with torch.no_grad():
        return perturb_by_hand(AccelerateRun(case, corpus, 0.0))


class AdapterReference(torch.nn.Module):
    """A model with an adapter, whose parameters are the adapter's alone."""

    def __init__(self, model: torch.nn.Module | None = None) -> None:
        super().__init__()
        model = model or small_model()
        torch.manual_seed(1)
        self.adapted = peft.get_peft_model(model, ADAPTER).double()

    def forward(self, ids):
        return self.adapted(input_ids=ids, use_cache=False)

    def named_parameters(self, *_, **__):
        return iter(trained(self.adapted))


EXACT = {"gradient_error": 1e-12, "learning_rate": 0.1}
TRAINER = EngineCase(train=train, perturb=perturb, engine={"kind": "trainer"}, **EXACT)
SFT = replace(TRAINER, engine={"kind": "sft"})
LORA = replace(TRAINER, engine={"kind": "lora"}, reference=AdapterReference)
ACCELERATE = EngineCase(train=train_with_accelerate, perturb=perturb_with_accelerate, **EXACT)
