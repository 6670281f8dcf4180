"""Trainers over a `PackedLoader`: resume, evaluation, and what is refused."""

import json
import shutil

import pytest
import torch
from test_loader_inputs import tokenizer  # noqa: F401

from evenload.errors import CheckpointError, ConfigError
from evenload.integrations.trainer import LOADER_STATE
from packed_cases import documents_of, loader_of, reference_gradient, tiny_model, tokens_of, write_texts
from rank_server import run_as_torchrun
from trainer_cases import PackedTrainer, arguments, run, run_on_rank, weights_of
from trl_cases import PackedSFTTrainer, sft_arguments

LOSS = 1e-12
WEIGHTS = 1e-12


def reference_run(root, num_steps, learning_rate=0.5, **settings):
    """Losses by step and final weights of SGD on the loader's steps, documents one by one."""
    model, losses = tiny_model(), {}
    loader = loader_of(root, **settings)
    while len(losses) < num_steps:
        for step in loader.steps():
            documents = [document for batch in step for document in documents_of(batch)]
            loss, _ = reference_gradient(model, documents)
            losses[len(losses) + 1] = loss
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= learning_rate * parameter.grad
            if len(losses) == num_steps:
                break
    loader.close()
    return losses, weights_of(model)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Short enough that four micro-batches always hold a batch; three batches an epoch."""
    root = tmp_path_factory.mktemp("corpus")
    write_texts(root, num_documents=24, longest=30)
    return root


def test_resume_goes_on_exactly_and_replays_nothing(corpus, tmp_path, monkeypatch):
    whole, weights, _ = run(corpus, tmp_path / "whole", max_steps=7)
    for stop in (2, 3):  # inside an epoch and at its very end
        output = tmp_path / f"stopped-{stop}"
        run(corpus, output, max_steps=stop, save_strategy="steps", save_steps=stop)
        checkpoint = output / f"checkpoint-{stop}"
        assert json.loads((checkpoint / LOADER_STATE).read_text())["given"] == 0
        read = []
        monkeypatch.setattr("evenload.data.loader.GlobalBatchLoader.next_batch", _counted(read))
        rest, result, _ = run(corpus, output, max_steps=7, resume=True)
        monkeypatch.undo()
        assert rest.train == {step: loss for step, loss in whole.train.items() if step > stop}
        torch.testing.assert_close(result, weights, rtol=0, atol=0)
        # What was left, and what was made ahead at the end; not the steps before.
        assert len(read) <= 7 - stop + 3
    shutil.move(checkpoint / LOADER_STATE, tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match="no readable loader state"):
        run(corpus, output, max_steps=7, resume=str(checkpoint))


def _counted(read):
    from evenload.data.loader import GlobalBatchLoader

    next_batch = GlobalBatchLoader.next_batch

    def counted(self):
        read.append(self)
        return next_batch(self)

    return counted


def test_evaluation_is_the_mean_over_all_label_tokens(corpus, tmp_path):
    """A mean of batch means weighs the short last batch as much as a full one (trl#1343, torchtitan#4167)."""
    losses, _, trainer = run(
        corpus, tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2, evaluation={"batch_tokens": 50}
    )
    model = trainer.model
    texts = [json.loads(line)["text"] for line in (corpus / "texts.jsonl").read_text().splitlines()]
    expected, _ = reference_gradient(model, [tokens_of(text) for text in texts])
    assert losses.evaluation[2] == pytest.approx(expected, rel=LOSS)
    again = trainer.evaluate()
    assert again["eval_loss"] == pytest.approx(expected, rel=LOSS)
    assert again["eval_label_tokens"] == sum(len(text) for text in texts)


def test_two_processes_train_and_evaluate_as_one(corpus, tmp_path):
    """The loss is over the global batch, so it depends neither on ranks nor on micro-batches."""
    settings = {"gradient_accumulation_steps": 2, "max_steps": 3}
    both = {"evaluation": {"batch_tokens": 50}, "eval_strategy": "steps", "eval_steps": 3}
    run_as_torchrun(2, run_on_rank, corpus, tmp_path, settings | both)
    train, evaluation, result = torch.load(tmp_path / "outcome.pt", weights_only=False)
    expected, weights = reference_run(corpus, 3)
    for step, loss in expected.items():
        assert train[step] == pytest.approx(loss, abs=2e-4)
    torch.testing.assert_close(result, weights, rtol=WEIGHTS, atol=WEIGHTS)
    texts = [json.loads(line)["text"] for line in (corpus / "texts.jsonl").read_text().splitlines()]
    model = tiny_model()
    torch.nn.utils.vector_to_parameters(weights, model.parameters())
    assert evaluation[3] == pytest.approx(reference_gradient(model, [tokens_of(t) for t in texts])[0], rel=LOSS)


@pytest.mark.parametrize(
    ("changes", "settings", "message"),
    [
        ({"gradient_accumulation_steps": 3}, {}, "gradient_accumulation_steps is 3, the loader makes 4"),
        ({}, {"compute_metrics": print}, "compute_metrics has no meaning"),
        ({}, {"data_collator": print}, "data_collator has no meaning"),
    ],
)
def test_what_the_trainer_would_do_otherwise_is_refused(corpus, tmp_path, changes, settings, message):
    with pytest.raises(ConfigError, match=message):
        PackedTrainer(
            tiny_model(), arguments(tmp_path, **changes), train_loader=loader_of(corpus, micro_batches=4), **settings
        )


def test_loaders_of_another_kind_are_refused(corpus, tmp_path):
    args = arguments(tmp_path)
    good = loader_of(corpus, micro_batches=4)
    evaluation = loader_of(corpus, evaluation=True, shuffle_window=1)
    for loaders, message in (
        ({"train_loader": loader_of(corpus, micro_batches=4, format="varlen")}, 'has format "varlen"'),
        ({"train_loader": evaluation}, "train_loader must not"),
        ({"train_loader": good, "eval_loader": good}, "eval_loader must be made with evaluation=True"),
        ({"train_loader": loader_of(corpus, micro_batches=4, rank=0, world_size=2)}, "the loader is rank 0 of 2"),
    ):
        with pytest.raises(ConfigError, match=message):
            PackedTrainer(tiny_model(), args, **loaders)
    trainer = PackedTrainer(tiny_model(), args, train_loader=good)
    with pytest.raises(ConfigError, match="eval_loader=PackedLoader"):
        trainer.evaluate()
    with pytest.raises(ConfigError, match="keeps no predictions; evaluate"):
        trainer.predict(None)


def test_packs_are_balanced_for_the_model_that_is_trained(corpus, tmp_path, caplog):
    """Loaders made without a model take the Trainer's; one made with a model keeps it."""
    caplog.set_level("INFO", "evenload.loader")
    train, evaluation = loader_of(corpus, micro_batches=4), loader_of(corpus, evaluation=True, shuffle_window=1)
    assert train.model_is_assumed
    PackedTrainer(tiny_model(), arguments(tmp_path), train_loader=train, eval_loader=evaluation)
    for loader in (train, evaluation):
        assert not loader.model_is_assumed
        assert "packs of equal time for llama;" in loader.start_messages[0]
    # Only the Trainer's model shows that a tokeniser is missing.
    large = tiny_model(vocab_size=5000)
    with pytest.raises(ConfigError, match="tokenizer is not given"):
        PackedTrainer(large, arguments(tmp_path), train_loader=loader_of(corpus, micro_batches=4))
    PackedTrainer(large, arguments(tmp_path), train_loader=loader_of(corpus, micro_batches=4, tokenizer="bytes"))
    named = loader_of(corpus, micro_batches=4, model="qwen2.5-0.5b")
    PackedTrainer(tiny_model(), arguments(tmp_path), train_loader=named)
    assert "qwen2.5-0.5b" in named.start_messages[0]


def test_a_model_that_cannot_take_the_count_is_refused(corpus, tmp_path):
    class Old(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = tiny_model()
            self.config = self.model.config

        def forward(self, input_ids, labels=None, position_ids=None):
            return self.model(input_ids=input_ids, labels=labels, position_ids=position_ids)

    with pytest.raises(ConfigError, match="Old takes no num_items_in_batch"):
        PackedTrainer(Old(), arguments(tmp_path), train_loader=loader_of(corpus, micro_batches=4))


# Its own use of names that transformers has renamed.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")


@pytest.fixture
def sft(tmp_path, tokenizer):  # noqa: F811
    """Makes TRL's trainer of a model and a loader; further options are those of `SFTConfig`."""

    def make(model, loader, **changes):
        args = sft_arguments(tmp_path / "out", **changes)
        return PackedSFTTrainer(model, args, train_loader=loader, processing_class=tokenizer)

    return make
