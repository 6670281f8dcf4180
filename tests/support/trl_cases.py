"""TRL's `SFTTrainer` with our loader, for tests in this process and on several ranks."""

import trl

from evenload.integrations.trainer import PackedTrainerMixin
from trainer_cases import arguments
from trainer_engine_cases import Recording


class RecordingSFTTrainer(Recording, PackedTrainerMixin, trl.SFTTrainer):
    """TRL's own."""


def sft_arguments(output, **changes):
    """As `trainer_cases.arguments`, of TRL."""
    plain = arguments(output, **changes)
    names = [
        *("max_steps", "gradient_accumulation_steps", "learning_rate", "lr_scheduler_type", "optim", "max_grad_norm"),
        *("logging_steps", "save_strategy", "save_steps", "report_to", "use_cpu", "disable_tqdm"),
        *("dataloader_pin_memory", "eval_strategy", "eval_steps"),
    ]
    return trl.SFTConfig(output_dir=str(output), bf16=False, **{name: getattr(plain, name) for name in names})
