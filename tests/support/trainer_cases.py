"""Trainers of a tiny model, for tests in this process and on several ranks."""

from pathlib import Path

import torch
from transformers import Trainer, TrainerCallback, TrainingArguments

from evenload.integrations.trainer import PackedTrainerMixin
from packed_cases import loader_of, tiny_model


class PackedTrainer(PackedTrainerMixin, Trainer):
    pass


class Losses(TrainerCallback):
    """Losses as the Trainer logs them."""

    def __init__(self):
        self.train, self.evaluation = {}, {}

    def on_log(self, args, state, control, logs, **_):
        if "loss" in logs:
            self.train[state.global_step] = logs["loss"]
        if "eval_loss" in logs:
            self.evaluation[state.global_step] = logs["eval_loss"]


PLAIN = {
    **{"max_steps": 5, "gradient_accumulation_steps": 4, "learning_rate": 0.5, "lr_scheduler_type": "constant"},
    **{"optim": "sgd", "max_grad_norm": 0.0, "logging_steps": 1, "save_strategy": "no", "report_to": []},
    **{"use_cpu": True, "disable_tqdm": True, "dataloader_pin_memory": False},
}
"""Plain SGD without clipping, so that weights tell the gradient."""


def arguments(output, **changes):
    return TrainingArguments(output_dir=str(output), **(PLAIN | changes))


def run(root, output, *, resume=None, loader=None, evaluation=None, model=None, **changes):
    """Train; returns losses by step, weights in one vector, and the trainer."""
    args = arguments(output, **changes)
    model = model or tiny_model()
    train_loader = loader_of(root, micro_batches=args.gradient_accumulation_steps, **(loader or {}))
    eval_loader = None if evaluation is None else loader_of(root, evaluation=True, shuffle_window=1, **evaluation)
    losses = Losses()
    trainer = PackedTrainer(model, args, train_loader=train_loader, eval_loader=eval_loader, callbacks=[losses])
    trainer.train(resume_from_checkpoint=resume)
    train_loader.close()
    return losses, weights_of(model), trainer


def weights_of(model):
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def run_on_rank(root, output, settings):
    """As one rank of several; rank 0 leaves losses by step and weights in `outcome.pt`."""
    losses, weights, trainer = run(root, output, **settings)
    if trainer.args.process_index == 0:
        torch.save((losses.train, losses.evaluation, weights), Path(output) / "outcome.pt")
    torch.distributed.destroy_process_group()
