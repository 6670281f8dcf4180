"""TRL's `SFTTrainer` trains from our loader as one document after another would."""

import pytest
import torch
import trl
from test_hf_objects import tokenizer  # noqa: F401
from test_trainer import WEIGHTS, reference_run

from evenload.errors import ConfigError
from evenload.integrations.trainer import PackedTrainerMixin
from packed_cases import loader_of, tiny_model, write_texts
from trainer_cases import weights_of
from trl_cases import kernel_in_float64

# Its own use of names that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def sft(tmp_path, tokenizer):  # noqa: F811
    class PackedSFTTrainer(PackedTrainerMixin, trl.SFTTrainer):
        pass

    def make(model, loader, **changes):
        settings = {
            "max_steps": 4,
            "gradient_accumulation_steps": 4,
            "learning_rate": 0.5,
            "lr_scheduler_type": "constant",
            "optim": "sgd",
            "max_grad_norm": 0.0,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "bf16": False,
            "disable_tqdm": True,
            "dataloader_pin_memory": False,
        }
        args = trl.SFTConfig(output_dir=str(tmp_path / "out"), **(settings | changes))
        return PackedSFTTrainer(model, args, train_loader=loader, processing_class=tokenizer)

    return make


def test_sft_trainer_trains_as_documents_one_by_one(tmp_path, sft):
    write_texts(tmp_path, num_documents=24, longest=30)
    _, weights = reference_run(tmp_path, 4)
    model = tiny_model()
    loader = loader_of(tmp_path, micro_batches=4)
    with kernel_in_float64():
        sft(model, loader).train()
    loader.close()
    torch.testing.assert_close(weights_of(model), weights, rtol=WEIGHTS, atol=WEIGHTS)


@pytest.mark.parametrize("changes", [{"packing": True}, {"padding_free": True}])
def test_options_that_would_do_nothing_are_refused(tmp_path, sft, changes):
    write_texts(tmp_path)
    with pytest.raises(ConfigError, match=next(iter(changes))):
        sft(tiny_model(), loader_of(tmp_path, micro_batches=4), **changes)
