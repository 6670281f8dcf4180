"""Trainer, TRL (with and without LoRA, on chats too) and Accelerate train a plan as documents one by one."""

import json

import pytest
import torch

from engine_conformance import check_gradients, check_isolation, check_training
from engine_records import RankRecord
from hf_tokenizer import some_tokenizer
from packed_cases import documents_of, loader_of, tiny_model
from sweeps import thorough
from trainer_engine_cases import ACCELERATE, ADAPTER, LORA, SFT, TRAINER, AdapterReference, trained
from trl_cases import RecordingSFTTrainer, sft_arguments

STEPS, MICRO_BATCHES, LEARNING_RATE = 4, 4, 0.1
EXACT = 1e-10
CASES = {"trainer": TRAINER, "sft": SFT, "lora": LORA, "accelerate": ACCELERATE}
# Its own use of names that transformers has renamed.
pytestmark = [pytest.mark.filterwarnings("ignore::FutureWarning"), pytest.mark.long]


def cases(*default):
    """All of them; those that are not named only in thorough runs."""
    return [pytest.param(case, id=name, marks=() if name in default else (thorough,)) for name, case in CASES.items()]


@pytest.mark.parametrize("case", cases("lora", "accelerate"))
def test_gradients_are_those_of_documents_one_by_one(gloo_pool, tmp_path, case):
    check_gradients(gloo_pool, case, tmp_path / "data")


@pytest.mark.parametrize("case", cases())
def test_documents_do_not_see_each_other(gloo_pool, tmp_path, case):
    check_isolation(gloo_pool, case, tmp_path / "data")


@pytest.mark.parametrize("case", cases("trainer", "sft", "accelerate"))
def test_training_is_plain_training_and_resumes_with_other_ranks(gloo_pool, tmp_path, case):
    check_training(gloo_pool, case, tmp_path / "data")


@pytest.fixture
def chats(tmp_path):
    """Conversations of one to three turns, answers from a word to a paragraph."""
    words = ["a", "small", "text", "another", "one", "longer", "than", "that", "and", "so", "on"]
    result = []
    for index in range(24):
        turns = []
        for turn in range(1 + index % 3):
            turns.append({"role": "user", "content": " ".join(words[: 1 + (index + turn) % 4])})
            turns.append({"role": "assistant", "content": " ".join(words[: 1 + (3 * index + turn) % 11])})
        result.append(turns)
    lines = [json.dumps({"messages": turns}) + "\n" for turns in result]
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "chats.jsonl").write_text("".join(lines))
    return result


def test_chats_train_what_the_assistant_says(tmp_path, chats):
    tokenizer = some_tokenizer()
    settings = {"tokenizer": tokenizer, "record": "messages", "loss_on": "completion", "max_tokens": 256}
    loader = loader_of(tmp_path / "data", micro_batches=MICRO_BATCHES, **settings)
    changes = {"max_steps": STEPS, "gradient_accumulation_steps": MICRO_BATCHES, "learning_rate": LEARNING_RATE}
    evaluation = loader_of(tmp_path / "data", evaluation=True, shuffle_window=1, **settings)
    trainer = RecordingSFTTrainer(
        tiny_model(vocab_size=300, initializer_range=0.05),
        sft_arguments(tmp_path, **changes),
        train_loader=loader,
        eval_loader=evaluation,
        processing_class=tokenizer,
        peft_config=ADAPTER,
    )
    reference = AdapterReference(tiny_model(vocab_size=300, initializer_range=0.05))
    weights = dict(reference.named_parameters())
    assert set(weights) == {name for name, _ in trained(trainer.model)}
    with torch.no_grad():
        for name, parameter in trained(trainer.model):
            parameter.copy_(weights[name])
    masks = {}
    for turns in chats:
        encoded = tokenizer.apply_chat_template(
            turns, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, add_generation_prompt=False
        )
        masks[tuple(encoded["input_ids"])] = encoded["assistant_masks"]
    trainer.record = RankRecord(0)
    trainer.train()
    loader.close()
    for documents, loss in zip(trainer.record.documents, trainer.record.losses, strict=True):
        expected = train_plainly(reference, documents, masks)
        assert loss == pytest.approx(expected, rel=EXACT)
    for name, result in trained(trainer.model):
        torch.testing.assert_close(result, weights[name], rtol=EXACT, atol=EXACT, msg=name)
    # Evaluation is the mean over the same tokens of all chats, once each.
    everything = [document for batch in evaluation for document in documents_of(batch)]
    assert len(everything) == len(chats)
    result = trainer.evaluate()
    assert result["eval_label_tokens"] == sum(sum(masks[document]) for document in everything)
    assert result["eval_loss"] == pytest.approx(train_plainly(reference, everything, masks), rel=EXACT)


def train_plainly(model, documents, masks):
    """The mean loss over what the assistant says, documents one by one, and a step of SGD."""
    count = sum(sum(masks[document][1:]) for document in documents)
    for _, parameter in model.named_parameters():
        parameter.grad = None
    total = 0.0
    for document in documents:
        ids = torch.tensor([document])
        labels = torch.where(torch.tensor(masks[document]).bool(), ids[0], -100)
        logits = model(ids).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, labels[1:], reduction="sum", ignore_index=-100) / count
        loss.backward()
        total += loss.item()
    with torch.no_grad():
        for _, parameter in model.named_parameters():
            parameter -= LEARNING_RATE * parameter.grad
    return total
