"""Trainers of transformers and TRL with and without a seam, on ranks of their own; the judge of divisions."""

import contextlib
from pathlib import Path

import numpy as np
import torch
from datasets import Dataset
from transformers import DataCollatorWithFlattening, Trainer

from packed_cases import tiny_model
from trainer_cases import arguments, weights_of

LINEAR_S, QUADRATIC_S, MICRO_BATCH_S = 61.68e-6, 2.724e-9, 18e-3
"""Of a Llama of 7B parameters on an H100; written here again, so that the judge is not what it judges."""


def work_s(lengths):
    tokens = np.asarray(lengths, np.float64)
    return LINEAR_S * tokens + QUADRATIC_S * tokens**2


def step_s(lengths, ranks) -> float:
    """Seconds of a step in which ranks wait at every micro-batch; `ranks[rank][j]` are indices."""
    seconds = work_s(lengths)
    return sum(
        max(sum(seconds[at] for at in one) for one in column) + MICRO_BATCH_S for column in zip(*ranks, strict=True)
    )


def skewed(random, num_documents, longest=16_000):
    """Lengths, most of them short and some very long."""
    return np.clip(random.lognormal(6.5, 1.3, num_documents), 8, longest).astype(int).tolist()


class _Recording:
    """Sums the losses of every optimizer step."""

    def training_step(self, *arguments, **settings):
        loss = super().training_step(*arguments, **settings)
        step = self.state.global_step
        self.losses[step] = self.losses.get(step, 0.0) + loss.detach().double()
        return loss

    def compute_loss(self, model, inputs, *arguments, **settings):
        self.shapes.append(int(inputs["input_ids"].numel()))
        return super().compute_loss(model, inputs, *arguments, **settings)


class RecordingTrainer(_Recording, Trainer):
    pass


def train_on_rank(kind: str, seam_settings, output: Path) -> None:
    """Three steps on a rank; rank r leaves losses, tokens of micro-batches and weights in `outcome-r.pt`."""
    from evenload.seams import transformers as seam

    random = np.random.default_rng(5)
    sizes = np.clip(random.lognormal(2.5, 1.0, 54), 2, 60).astype(int)
    texts = [random.integers(0, 256, size).tolist() for size in sizes]
    changes = {
        **{"max_steps": 3, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 3},
        "train_sampling_strategy": "batch_rebalance",
    }
    with contextlib.nullcontext() if seam_settings is None else seam.install(**seam_settings):
        trainer = _trainer(kind, texts, output, changes)
        trainer.losses, trainer.shapes = {}, []
        trainer.train()
    losses = torch.stack([trainer.losses[step] for step in sorted(trainer.losses)])
    torch.distributed.all_reduce(losses)
    outcome = (losses, trainer.shapes, weights_of(trainer.model))
    torch.save(outcome, output / f"outcome-{trainer.args.process_index}.pt")
    torch.distributed.destroy_process_group()


def _trainer(kind, texts, output, changes):
    if kind == "transformers":
        data = Dataset.from_dict({"input_ids": texts, "labels": texts})
        args = arguments(output, **changes)
        return RecordingTrainer(tiny_model(), args, train_dataset=data, data_collator=DataCollatorWithFlattening())
    # Importing TRL takes seconds.
    import trl

    from hf_tokenizer import some_tokenizer
    from trl_cases import kernel_in_float64, sft_arguments

    class RecordingSFTTrainer(_Recording, trl.SFTTrainer):
        def train(self, *arguments, **settings):
            with kernel_in_float64():
                return super().train(*arguments, **settings)

    args = sft_arguments(output, padding_free=True, max_length=None, **changes)
    data = Dataset.from_dict({"input_ids": texts})
    return RecordingSFTTrainer(tiny_model(), args, train_dataset=data, processing_class=some_tokenizer())
