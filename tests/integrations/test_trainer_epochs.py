"""`PackedTrainer` and `PackedSFTTrainer` as they come: epochs by their number, accumulation written once."""

import sys
from collections import Counter

import pytest
import torch
from test_loader_inputs import tokenizer  # noqa: F401
from transformers import Trainer, TrainerCallback

import evenload
from evenload import PackedLoader, PackedSFTTrainer, PackedTrainer
from evenload.errors import ConfigError, MissingPackageError
from packed_cases import documents_of, loader_of, tiny_model, tokens_of, write_texts
from rank_server import run_as_torchrun
from trainer_cases import arguments, weights_of
from trl_cases import sft_arguments

# TRL's own use of names that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("corpus")
    write_texts(root, num_documents=24, longest=30)
    return root


class Seen(TrainerCallback):
    """Counts what the Trainer says of epochs."""

    def __init__(self):
        self.epochs, self.ends, self.logged = [], 0, []

    def on_step_end(self, args, state, control, **_):
        self.epochs.append(state.epoch)

    def on_epoch_end(self, args, state, control, **_):
        self.ends += 1

    def on_log(self, args, state, control, logs, **_):
        self.logged.append(logs)


def full_loader(corpus, **changes):
    """Batches that fill their packs, in this process."""
    return PackedLoader(str(corpus), **({"max_tokens": 64, "workers": 0, "seed": 3, "shuffle_window": 16} | changes))


def trained(corpus, output, loader=None, *, resume=None, **changes):
    """Train; the trainer, and all documents that it trained, by step."""
    loader, seen, steps = loader or full_loader(corpus), Seen(), []

    class Recorded(PackedTrainer):
        def get_batch_samples(self, *arguments):
            samples, count = super().get_batch_samples(*arguments)
            if samples:
                steps.append(Counter(document for batch in samples for document in documents_of(batch)))
            return samples, count

    args = arguments(output, **({"max_steps": -1, "gradient_accumulation_steps": 2} | changes))
    trainer = Recorded(tiny_model(), args, train_loader=loader, callbacks=[seen])
    trainer.train(resume_from_checkpoint=resume)
    loader.close()
    return trainer, seen, steps


def texts_of(corpus):
    import json

    return Counter(tokens_of(json.loads(line)["text"]) for line in (corpus / "texts.jsonl").read_text().splitlines())


def times(documents: Counter, number: int) -> Counter:
    return Counter({document: count * number for document, count in documents.items()})


def test_both_are_ready_classes():
    import trl

    assert issubclass(PackedTrainer, Trainer)
    assert issubclass(PackedSFTTrainer, trl.SFTTrainer)
    assert evenload.PackedSFTTrainer is PackedSFTTrainer
    assert {"PackedTrainer", "PackedSFTTrainer"} <= set(dir(evenload))


def test_without_trl_its_trainer_says_how_to_get_it(monkeypatch):
    from evenload.integrations.trainer import packed_sft_trainer

    packed_sft_trainer.cache_clear()
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(MissingPackageError, match=r"PackedSFTTrainer needs TRL.*pip install 'trl>=1\.16,<2'"):
        evenload.PackedSFTTrainer  # noqa: B018
    assert evenload.PackedTrainer is PackedTrainer
    monkeypatch.undo()
    packed_sft_trainer.cache_clear()


@pytest.mark.parametrize("epochs", [1, 3])
def test_every_document_is_trained_as_often_as_there_are_epochs(corpus, tmp_path, epochs):
    trainer, seen, steps = trained(corpus, tmp_path, num_train_epochs=epochs)
    assert sum(steps, Counter()) == times(texts_of(corpus), epochs)
    assert len(steps) == trainer.state.global_step == trainer.state.max_steps
    assert seen.ends == epochs
    assert seen.epochs[-1] == epochs
    assert seen.epochs == sorted(seen.epochs)
    assert seen.logged[-1]["epoch"] == epochs


@pytest.mark.parametrize("length", [2, 40], ids=["too short", "too long"])
def test_the_end_is_that_of_the_data_where_the_length_was_an_estimate(corpus, tmp_path, monkeypatch, length):
    monkeypatch.setattr(PackedLoader, "__len__", lambda self: length)
    trainer, _, steps = trained(corpus, tmp_path, num_train_epochs=2)
    assert sum(steps, Counter()) == times(texts_of(corpus), 2)
    assert len(steps) == trainer.state.global_step == trainer.state.max_steps


def test_a_share_of_an_epoch_is_a_share_of_its_steps(corpus, tmp_path):
    loader = full_loader(corpus, micro_batches=1, max_tokens=32)
    steps = len(loader)
    trainer, _, _ = trained(corpus, tmp_path, loader, num_train_epochs=1.5, gradient_accumulation_steps=1)
    assert trainer.state.global_step == -(-3 * steps // 2)


@pytest.mark.parametrize("epochs", [1, 2])
def test_epochs_go_on_from_a_checkpoint(corpus, tmp_path, epochs):
    """From the middle of an epoch, its end, and the end of all, where nothing is left."""
    whole, _, steps = trained(corpus, tmp_path, num_train_epochs=epochs, save_strategy="steps", save_steps=1)
    for after in {1, len(steps) // epochs, len(steps) - 1, len(steps)}:
        checkpoint = str(tmp_path / f"checkpoint-{after}")
        rest, _, more = trained(corpus, tmp_path / "rest", resume=checkpoint, num_train_epochs=epochs)
        assert more == steps[after:]
        assert rest.state.global_step == len(steps)
        torch.testing.assert_close(weights_of(rest.model), weights_of(whole.model), rtol=0, atol=0)


def test_accumulation_is_written_once(corpus, tmp_path):
    """In the arguments or in the loader; in both only the same."""
    of_arguments, _, steps = trained(corpus, tmp_path, num_train_epochs=1, gradient_accumulation_steps=3)
    assert of_arguments._train_loader.options.micro_batches == 3
    of_loader, _, same = trained(
        corpus, tmp_path, full_loader(corpus, micro_batches=3), num_train_epochs=1, gradient_accumulation_steps=1
    )
    assert of_loader.args.gradient_accumulation_steps == 3
    assert same == steps
    torch.testing.assert_close(weights_of(of_loader.model), weights_of(of_arguments.model), rtol=0, atol=0)
    with pytest.raises(ConfigError, match="gradient_accumulation_steps is 4, the loader makes 3"):
        trained(corpus, tmp_path, full_loader(corpus, micro_batches=3), gradient_accumulation_steps=4)
    fixed = loader_of(corpus, engine="trainer")
    trained(corpus, tmp_path, fixed, max_steps=1, gradient_accumulation_steps=8)
    assert fixed.options.micro_batches == 8


def test_epochs_that_the_loader_does_not_have_are_refused(corpus, tmp_path):
    with pytest.raises(ConfigError, match="num_train_epochs is 3, the loader ends after 2; leave one out"):
        trained(corpus, tmp_path, full_loader(corpus, epochs=2), num_train_epochs=3)
    _, _, steps = trained(corpus, tmp_path, full_loader(corpus, epochs=2), num_train_epochs=2)
    assert sum(steps, Counter()) == times(texts_of(corpus), 2)


def test_nothing_is_balanced_for_a_model_that_is_assumed(corpus, tmp_path, caplog):
    """Not even of a model that has no configuration to be read."""

    class Bare(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny_model()

        def forward(self, input_ids, labels=None, position_ids=None, num_items_in_batch=None, **rest):
            return self.model(input_ids=input_ids, labels=labels, position_ids=position_ids,
                              num_items_in_batch=num_items_in_batch, **rest)  # fmt: skip

    loader = full_loader(corpus)
    PackedTrainer(Bare(), arguments(tmp_path, max_steps=1), train_loader=loader).train()
    assert not loader.model_is_assumed
    assert "equal time for Bare;" in loader.start_messages[0]
    assert not [one for one in caplog.records if "assumed" in one.message or "balance" in one.message]


def test_trl_trains_epochs_too(corpus, tmp_path, tokenizer):  # noqa: F811
    args = sft_arguments(tmp_path, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
    loader = full_loader(corpus)
    trainer = PackedSFTTrainer(tiny_model(), args, train_loader=loader, processing_class=tokenizer)
    trainer.train()
    assert loader.epoch in (1, 2)
    assert trainer.state.global_step == trainer.state.max_steps
    assert any(line.startswith("trained") and " 48 documents" in line for line in loader.ledger_lines)


def train_on_rank(root, output):
    """As one of two; rank 0 leaves what it did."""
    args = arguments(output, max_steps=-1, num_train_epochs=2, gradient_accumulation_steps=2)
    loader = full_loader(root)  # once the arguments have started torch.distributed
    trainer = PackedTrainer(tiny_model(), args, train_loader=loader)
    trainer.train()
    if trainer.args.process_index == 0:
        torch.save((trainer.state.global_step, trainer.state.max_steps, loader.ledger_lines), output / "outcome.pt")
    loader.close()
    torch.distributed.destroy_process_group()


def test_two_processes_end_together(corpus, tmp_path):
    run_as_torchrun(2, train_on_rank, corpus, tmp_path)
    steps, most, lines = torch.load(tmp_path / "outcome.pt", weights_only=False)
    assert steps == most
    assert any(line.startswith("trained") and " 48 documents" in line for line in lines)
