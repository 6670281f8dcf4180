"""torchtitan's own `train()` on CPU processes trains a plan as documents one by one: `make test-engines`."""

import importlib.util
from dataclasses import dataclass, fields
from types import SimpleNamespace

import pytest

if importlib.util.find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed: make test-engines", allow_module_level=True)

import torch

import torchtitan_cases as titan
from engine_conformance import FreshRanks, check_gradients, check_isolation, check_training
from engine_examples import losses, write_pages
from evenload.errors import ConfigError, DataError
from packed_cases import write_texts

pytestmark = pytest.mark.long


def test_gradients_are_those_of_documents_one_by_one(tmp_path):
    check_gradients(FreshRanks(), titan.TITAN, tmp_path / "data")


def test_documents_do_not_see_each_other(tmp_path):
    check_isolation(FreshRanks(), titan.TITAN, tmp_path / "data")


def test_training_is_plain_training_and_resumes_with_other_ranks(tmp_path):
    """With the loss in chunks, as torchtitan's own configurations have it."""
    check_training(FreshRanks(), titan.CHUNKED, tmp_path / "data")


def test_the_example_learns_and_goes_on_with_other_ranks(tmp_path):
    data = write_pages(tmp_path)
    first = losses(2, "torchtitan_train.py", data, tmp_path / "run", 2, "--tokens", 2048, "--longest", 256)
    rest = losses(1, "torchtitan_train.py", data, tmp_path / "run", 4, "--tokens", 2048, "--longest", 256)
    assert (list(first), list(rest)) == ([1, 2], [3, 4])
    assert rest[4] < rest[3] < first[1]


def loader_of_titan(folder, *, world_size=1, rank=0, seq_len=128, tokenizer=None, **settings):
    loader = {"data": str(folder), "tokenizer": "bytes", "batch_documents": 8, "workers": 0, "seed": 3} | settings
    config = titan.PackedDataLoader.Config(loader=loader)
    sizes = {"seq_len": seq_len, "local_batch_size": 1, "snapshot_every_n_steps": None}
    return config.build(dp_world_size=world_size, dp_rank=rank, tokenizer=tokenizer, **sizes)


def test_batches_have_torchtitans_shape(tmp_path):
    write_texts(tmp_path)
    loader = loader_of_titan(tmp_path)
    inputs, labels = next(iter(loader))
    loader.close()
    assert set(inputs) == {"input", "positions"}
    shapes = {inputs["input"].shape, inputs["positions"].shape, labels.shape}
    assert len(shapes) == 1
    assert inputs["input"].ndim == 2
    # A document begins where its positions do, and its last token predicts nothing.
    ends = torch.roll(inputs["positions"].flatten() == 0, -1)
    assert bool((labels.flatten()[ends] == -100).all())


def test_the_number_of_micro_batches_follows_the_plan(tmp_path):
    write_texts(tmp_path, num_documents=60, longest=60)
    settings = {"world_size": 2, "seq_len": 64, "batch_documents": 12}
    ranks = [loader_of_titan(tmp_path, rank=rank, **settings) for rank in (0, 1)]
    counts = []
    for _ in range(6):
        counts.append(ranks[0].begin_step())
        assert ranks[1].begin_step() == counts[-1]
        for loader in ranks:
            batches = iter(loader)
            for _ in range(counts[-1]):
                next(batches)
    assert len(set(counts)) > 1, "every step as many: shows nothing"
    for loader in ranks:
        loader.close()


def test_the_state_is_that_between_two_steps(tmp_path):
    write_texts(tmp_path)
    one = loader_of_titan(tmp_path)
    batches = iter(one)
    for _ in range(one.begin_step()):
        next(batches)
    state = one.state_dict()
    other = loader_of_titan(tmp_path, seq_len=128)
    other.load_state_dict(state)
    for (left, labels), (right, expected) in zip(
        [next(batches) for _ in range(5)], [batch for batch, _ in zip(other, range(5), strict=False)], strict=True
    ):
        assert torch.equal(left["input"], right["input"])
        assert torch.equal(labels, expected)
    while one.begin_step() == 1:
        next(batches)
    next(batches)
    with pytest.raises(ConfigError, match="save between two steps"):
        one.state_dict()
    with pytest.raises(ConfigError, match="it is none of ours"):
        other.load_state_dict({"dp_rank_0": b"", "world_size": 1})
    one.close()
    other.close()


def test_data_end_where_torchtitan_expects_it(tmp_path):
    write_texts(tmp_path, num_documents=8)
    loader = loader_of_titan(tmp_path, epochs=1)
    count = loader.begin_step()
    assert len(list(loader)) == count
    with pytest.raises(titan.DataloaderExhaustedError):
        loader.begin_step()
    loader.close()


def test_a_step_without_a_loss_is_refused(tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"input_ids": [1, 2, 3], "labels": [-100, -100, -100]}\n' * 8)
    loader = loader_of_titan(tmp_path, record="tokens", labels_column="labels", shuffle_window=1)
    with pytest.raises(DataError, match="no token with a loss"):
        loader.begin_step()
    loader.close()


@pytest.mark.parametrize(
    ("loader", "message"),
    [
        ({"group": None}, "'group'.* is not yours to set: torchtitan's mesh"),
        ({"format": "hf"}, "'format'.* torchtitan determines"),
        ({"max_tokens": 256}, "set training.seq_len = 256"),
    ],
)
def test_what_the_mesh_says_is_not_asked(tmp_path, loader, message):
    with pytest.raises(ConfigError, match=message):
        loader_of_titan(tmp_path, **loader)


def test_torchtitans_tokenizer_is_ours_where_none_is_named(tmp_path):
    write_texts(tmp_path / "data")
    config = titan.trainer_config(tmp_path, tmp_path / "data", tokenizer=None)
    titan.write_tokenizer(config)
    tokenizer = config.tokenizer.build(tokenizer_path=config.hf_assets_path)
    del config.dataloader.loader["tokenizer"]
    sizes = {"seq_len": 128, "local_batch_size": 1}
    loader = config.dataloader.build(dp_world_size=1, dp_rank=0, tokenizer=tokenizer, **sizes)
    assert loader.loader.options.tokenizer == config.hf_assets_path
    loader.close()


def last_attention(config):
    return config.model_spec.model.layers[-1].attention


SDPA = titan.ScaledDotProductAttention.Config()
CHANGES = {
    "batch": (lambda config: setattr(config.training, "local_batch_size", 2), "a micro-batch is one pack"),
    "pipeline": (lambda config: setattr(config.parallelism, "pipeline_parallel_degree", 2), "one shape"),
    "context": (lambda config: setattr(config.parallelism, "context_parallel_degree", 2), "use 'evenload train'"),
    "tensor": (lambda config: setattr(config.parallelism, "tensor_parallel_degree", 2), "not tested"),
    "chunks": (lambda config: config.dataloader.loader.update(pack_multiple=6), "'pack_multiple'. = 4"),
    "no layers": (
        lambda config: setattr(config.model_spec, "model", SimpleNamespace()),
        "no layers that could be checked",
    ),
    "no attention": (
        lambda config: setattr(config.model_spec, "model", SimpleNamespace(layers=[SimpleNamespace()])),
        "layer 0 .*no attention that is known",
    ),
    "attention": (lambda config: setattr(last_attention(config), "inner_attention", SDPA), "layer 1"),
    "loader": (lambda config: setattr(config, "dataloader", titan.Trainer.Config().dataloader), "packed_config"),
}


@pytest.mark.parametrize(("change", "message"), CHANGES.values(), ids=CHANGES)
def test_what_would_train_something_else_is_refused_at_start(tmp_path, change, message):
    config = titan.trainer_config(tmp_path, tmp_path, chunked=True)
    titan.torchtitan_trainer.refuse_config(config)
    change(config)
    with pytest.raises(ConfigError, match=message):
        titan.torchtitan_trainer.refuse_config(config)


def test_a_trainer_of_others_is_not_replaced(tmp_path):
    @dataclass(kw_only=True, slots=True)
    class Theirs(titan.torchtitan_trainer.Trainer.Config):
        temperature: float = 1.0

    @dataclass(kw_only=True, slots=True)
    class Ours(titan.PackedTrainer.Config):
        temperature: float = 1.0

    packed = titan.trainer_config(tmp_path, tmp_path)
    values = {field.name: getattr(packed, field.name) for field in fields(packed)}
    with pytest.raises(ConfigError, match=r"Theirs is the configuration of another trainer.*derive"):
        titan.packed_config(Theirs(**values), {"data": "corpus"})
    result = titan.packed_config(Ours(**values, temperature=2.0), {"data": "corpus"})
    assert (type(result), result.temperature, result.dataloader.loader["data"]) == (Ours, 2.0, "corpus")


def test_the_next_layout_is_refused_with_what_works(tmp_path):
    config = titan.trainer_config(tmp_path, tmp_path)
    config.training = SimpleNamespace(num_tokens_per_microbatch_per_dp_rank=8)
    with pytest.raises(ConfigError, match=r"no local_batch_size.*install torchtitan==0\.3\.0"):
        titan.torchtitan_trainer.refuse_config(config)


def test_packs_are_balanced_for_torchtitans_model():
    spec = titan.torchtitan_trainer.model_of("llama3", titan.tiny_spec().model)
    heads = spec.attentions[0]
    result = (spec.num_layers, spec.hidden_size, heads.heads, heads.kv_heads, heads.head_dim, spec.vocab_size)
    assert result == (2, 256, 16, 16, 16, 2048)
    # As many weights as torchtitan's model has, which has no bias.
    model = titan.tiny_spec().model
    matrices = sum(parameter.numel() for parameter in model.build().parameters() if parameter.ndim > 1)
    assert matrices == 2 * 2048 * 256 + 2 * (4 * 256 * 256 + 3 * 256 * spec.kinds[0].inner)
