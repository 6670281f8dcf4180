"""Micro-batches of trees give the loss and all gradients of plain autograd, path by path."""

import copy
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, NemotronConfig, T5Config, T5ForConditionalGeneration

from evenload.errors import ConfigError, DataError, UnsupportedModelError
from evenload.integrations import tree_attention as attention_module
from evenload.integrations import tree_packer
from evenload.integrations.tree_attention import tree_attention
from evenload.integrations.tree_packer import TreePacker
from evenload.types.tree import RowRun, TreeShape
from reference_training import RECURRENT_KINDS, plain_model, relative_error, tiny_config

VOCAB = 97
LIMIT = 1e-10
KINDS = {
    "llama": ("llama", {}),
    "qwen3, groups of heads, tied": ("qwen3", {"tied": True}),
    "mistral, window": ("mistral", {"sliding_window": 9}),
    "gemma3, windows by turns": ("gemma3", {"num_hidden_layers": 3}),
    "gpt2, learned positions": ("gpt2", {}),
    "qwen3_moe, no balance loss": ("qwen3_moe", {}),
    "deepseek_v3, latent attention": ("deepseek_v3", {}),
}


def make_model(kind, seed=0, **changes):
    config = tiny_config(kind, **{"num_hidden_layers": 2, **changes})
    torch.manual_seed(seed)
    weights = AutoModelForCausalLM.from_config(config, dtype=torch.float64).state_dict()
    return lambda: plain_model(config, weights, torch.float64)


def random_sequences(seed, depth=4, most=12):
    """Inner nodes may end a sequence, siblings may begin alike, one sequence comes twice, one has one token."""
    rng = np.random.default_rng(seed)
    found = []

    def grow(prefix, level):
        path = np.concatenate([prefix, rng.integers(0, VOCAB, rng.integers(1, most + 1))])
        if level == depth or rng.random() < 0.25:
            found.append(path)
            return
        if rng.random() < 0.3:
            found.append(path)
        for _ in range(rng.integers(1, 4)):
            grow(path, level + 1)

    for _ in range(2):
        grow(np.zeros(0, np.int64), 0)
    found = [found[at] for at in rng.permutation(len(found))[:14]]
    return [*found, found[0].copy(), found[0][:-1], rng.integers(0, VOCAB, 1)]


def random_weights(sequences, seed):
    rng = np.random.default_rng(seed + 1)
    return [np.where(rng.random(len(one)) < 0.7, rng.normal(size=len(one)), 0.0) for one in sequences]


def ones(sequences):
    return [np.ones(len(one)) for one in sequences]


def weighted(weights):
    return lambda logps: -sum((torch.from_numpy(weights[i][1:]) * one).sum() for i, one in logps.items())


def clipped(sequences, seed=0):
    """PPO's clipped loss, not linear in log-probabilities: a shared token has another gradient by every path."""
    rng = np.random.default_rng(seed + 2)
    old = [torch.from_numpy(rng.normal(size=len(one) - 1) * 0.3 - 4.5) for one in sequences]
    advantage = rng.normal(size=len(sequences))

    def loss(logps):
        total = 0.0
        for i, one in logps.items():
            ratio = (one - old[i]).exp()
            total = total - torch.minimum(ratio * advantage[i], ratio.clamp(0.8, 1.2) * advantage[i]).sum()
        return total

    return loss


def preferred(logps):
    """DPO's loss of pairs at places (0, 1), (2, 3), ..."""
    pairs = [(i, i + 1) for i in logps if i % 2 == 0]
    return sum(nn.functional.softplus(-0.3 * (logps[a].sum() - logps[b].sum()) / 10) for a, b in pairs)


def by_paths(model, sequences, weights, loss):
    """Plain autograd, each sequence by itself."""
    logps = {}
    for place, tokens in enumerate(sequences):
        ids = torch.from_numpy(np.asarray(tokens, np.int64))
        found = torch.log_softmax(model(ids[None]).logits[0, :-1], -1).gather(1, ids[1:, None])[:, 0]
        logps[place] = found * torch.from_numpy(np.asarray(weights[place])[1:] != 0)
    total = loss(logps)
    total.backward()
    return total.item(), {name: one.grad for name, one in model.named_parameters()}


def by_trees(model, batches, loss):
    total = 0.0
    for batch in batches:
        part = loss(batch, model(**batch.inputs).logits)
        part.backward()
        total += part.item()
    return total, {name: one.grad for name, one in model.named_parameters()}


def worst_error(found, expected):
    (loss, gradients), (true_loss, true_gradients) = found, expected
    errors = [relative_error(gradients[name], one) for name, one in true_gradients.items() if one is not None]
    return max(abs(loss - true_loss) / max(1.0, abs(true_loss)), *errors)


def error_of(make, sequences, weights, loss, *, max_tokens=10_000, groups=None, change=None, own_loss=None, **options):
    """The worst relative error of the loss and of any gradient; `change` spoils the packer."""
    expected = by_paths(make(), sequences, weights, loss)
    model = make()
    packer = TreePacker(max_tokens, model, **{"min_shared_tokens": 1, **options})
    if change is not None:
        change(packer)
    batches = packer.pack(sequences, weights, groups)
    assert sorted(place for batch in batches for place in batch.sequences) == list(range(len(sequences)))
    assert sum(batch.num_path_tokens for batch in batches) == sum(map(len, sequences))
    assert all(batch.num_tokens <= max_tokens for batch in batches)
    found = by_trees(model, batches, own_loss or (lambda batch, logits: loss(batch.path_logps(logits))))
    return worst_error(found, expected)


def own_loss(batch, logits):
    return batch.loss(logits)


@pytest.mark.parametrize("kind", KINDS)
def test_ppo_clip_equals_path_by_path_autograd(kind):
    name, changes = KINDS[kind]
    for seed in range(2):
        sequences = random_sequences(seed)
        make = make_model(name, seed, **changes)
        assert error_of(make, sequences, ones(sequences), clipped(sequences, seed)) < LIMIT


@pytest.mark.parametrize("kind", ["llama", "gemma3, windows by turns"])
@pytest.mark.parametrize("seed", [0, 1])
def test_weights_of_either_sign_and_none_and_a_limit_that_cuts_trees(kind, seed):
    name, changes = KINDS[kind]
    make, sequences = make_model(name, seed, **changes), random_sequences(seed)
    weights = random_weights(sequences, seed)
    limit = max(map(len, sequences)) + 5
    for options in ({}, {"max_tokens": limit}, {"min_shared_tokens": 6}, {"max_tokens": limit, "min_shared_tokens": 4}):
        assert error_of(make, sequences, weights, weighted(weights), own_loss=own_loss, **options) < LIMIT
        assert error_of(make, sequences, weights, weighted(weights), **options) < LIMIT


def test_dpo_in_groups_keeps_pairs_together():
    rng = np.random.default_rng(3)
    prompts = [rng.integers(0, VOCAB, n) for n in (9, 1, 12, 5)]
    sequences = [
        np.concatenate([prompt, rng.integers(0, VOCAB, rng.integers(1, 9))]) for prompt in prompts for _ in "ab"
    ]
    weights = [np.arange(len(one)) >= len(prompts[i // 2]) for i, one in enumerate(sequences)]
    groups = [i // 2 for i in range(len(sequences))]
    make = make_model("llama")
    for options in ({"max_tokens": 35}, {"min_shared_tokens": 8, "max_tokens": 35}):
        assert error_of(make, sequences, weights, preferred, groups=groups, **options) < LIMIT


def test_a_label_of_one_path_only_is_none_of_the_others():
    """Turns: the first answer is a label of the first sequence, and only read by the second."""
    sequences = [np.arange(20), np.arange(40)]
    weights = [np.arange(20) >= 10, np.arange(40) >= 30]
    model = make_model("llama")()
    (batch,) = TreePacker(100, model, min_shared_tokens=8).pack(sequences, weights)
    logps = batch.path_logps(model(**batch.inputs).logits)
    for place, own in enumerate(weights):
        assert (logps[place] != 0).tolist() == own[1:].tolist()
    assert error_of(make_model("llama"), sequences, weights, lambda logps: -logps[1].sum()) < LIMIT


def test_a_shared_label_counts_once():
    sequences = random_sequences(4)
    make, counted = make_model("llama"), []
    seen = set()
    for tokens in sequences:
        counted.append(np.array([tuple(tokens[: at + 1]) not in seen for at in range(len(tokens))], float))
        seen |= {tuple(tokens[: at + 1]) for at in range(len(tokens))}
    loss = weighted(counted)
    for options in ({}, {"max_tokens": max(map(len, sequences)) + 3}):
        options |= {"tree_labels": "once", "own_loss": own_loss}
        expected = by_paths(make(), sequences, ones(sequences), loss)
        model = make()
        packer = TreePacker(options.pop("max_tokens", 9999), model, min_shared_tokens=1, tree_labels="once")
        batches = packer.pack(sequences, ones(sequences))
        assert sum(one.sum() for batch in batches for one in batch.weights.values()) == sum(
            c[1:].sum() for c in counted
        )
        assert worst_error(by_trees(model, batches, own_loss), expected) < LIMIT
    weights = ones(sequences)
    weights[0] = weights[0] * 2
    with pytest.raises(DataError, match="cannot count once"):
        packer.pack(sequences, weights)


def all_rows(shape, start, stop):
    """A row sees all rows before it, of siblings too."""
    return [one._replace(seen=[RowRun(0, one.rows.stop)]) for one in _RANGES(shape, start, stop)]


def first_child_only(shape, start, stop):
    rows, labelled = _EDGES(shape, start, stop)
    _, first = np.unique(rows, return_index=True)
    return rows[first], labelled[first]


def window_of_rows(query, key, value, inputs, *, window=0, scale=None):
    """Keys that are further away in rows are not seen, however near they are on the path."""
    index, out = inputs["key_index"], torch.empty_like(query)
    q_edges, k_edges = inputs["cu_seq_lens_q"].tolist(), inputs["cu_seq_lens_k"].tolist()
    for a, b, lo, hi in zip(q_edges, q_edges[1:], k_edges, k_edges[1:]):  # noqa: B905
        rows, keys = torch.arange(a, b)[:, None], index[lo:hi]
        seen = (keys <= rows) & ((rows - keys < window) if window else True)
        q, k, v = (one.transpose(0, 1) for one in (query[a:b], key[keys], value[keys]))
        made = nn.functional.scaled_dot_product_attention(q[None], k[None], v[None], seen, scale=scale, enable_gqa=True)
        out[a:b] = made[0].transpose(0, 1)
    return out


def without_gradient(rows, targets):
    return rows.detach()


_RANGES, _EDGES = TreeShape.path_ranges, TreeShape.edges
MUTANTS = {
    "positions by row": ("llama", TreeShape, "positions", lambda self, start, stop: np.arange(start, stop)),
    "keys of a sibling": ("llama", TreeShape, "path_ranges", all_rows),
    "window by row": ("mistral", attention_module, "tree_attention", window_of_rows),
    "one label of a branch row": ("llama", TreeShape, "edges", first_child_only),
    "window one key too wide": (
        "mistral", attention_module, "_visible",
        lambda rows, keys, window, device: _VISIBLE(rows, keys, window and window + 1, device),
    ),
    "masks top left": (
        "llama", attention_module, "_visible", lambda rows, keys, window, device: torch.ones(rows, keys).tril().bool(),
    ),
}  # fmt: skip
_VISIBLE = attention_module._visible


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_found(mutant, monkeypatch):
    kind, place, name, spoiled = MUTANTS[mutant]
    make, sequences = make_model(kind, **({"sliding_window": 9} if kind == "mistral" else {})), random_sequences(0)

    def spoil(_):
        monkeypatch.setattr(place, name, spoiled)

    assert error_of(make, sequences, ones(sequences), clipped(sequences)) < LIMIT
    assert error_of(make, sequences, ones(sequences), clipped(sequences), change=spoil) > 1e-4


def test_a_label_that_counts_once_under_sum_is_found():
    sequences = random_sequences(0)

    def spoil(packer):
        packer._labels = "once"

    given = make_model("llama"), sequences, ones(sequences), weighted(ones(sequences))
    assert error_of(*given, own_loss=own_loss) < LIMIT
    assert error_of(*given, own_loss=own_loss, change=spoil) > 1e-2


@pytest.mark.parametrize("name", ["positions", "path_ranges", "tree_attention"])
def test_the_proof_at_construction_finds_mutants(name, monkeypatch):
    """With a window of fewer keys than the proof's tokens, all but those of labels."""
    _, place, name, spoiled = next(one for one in MUTANTS.values() if one[2] == name)
    model = make_model("mistral", sliding_window=9)()
    monkeypatch.setattr(place, name, spoiled)
    with pytest.raises(UnsupportedModelError, match=r"lets a path see its sibling"):
        TreePacker(100, model)
    assert model.config._attn_implementation == "sdpa"


def test_micro_batches_say_what_they_hold_and_are_the_same_again():
    rng = np.random.default_rng(0)
    head = rng.integers(0, VOCAB, 40)
    sequences = [np.concatenate([head, [i], rng.integers(0, VOCAB, 9)]) for i in range(10)]
    packer = TreePacker(80, make_model("llama")(), min_shared_tokens=8)
    batches = packer.pack(sequences, ones(sequences))
    assert [batch.num_tokens for batch in batches] == [80, 80, 60]
    assert [batch.num_path_tokens for batch in batches] == [200, 200, 100]
    assert sorted(batch.num_recomputed_tokens for batch in batches) == [0, 40, 40]
    again = packer.pack(sequences, ones(sequences))
    for one, other in zip(batches, again, strict=True):
        assert one.sequences == other.sequences
        assert all(torch.equal(a, b) for a, b in zip(one.inputs.values(), other.inputs.values()) if torch.is_tensor(a))  # noqa: B905
    (batch,) = TreePacker(999, make_model("llama")(), min_shared_tokens=8).pack(
        sequences, [w * 0 for w in ones(sequences)]
    )
    logits = torch.zeros(1, 1, VOCAB, requires_grad=True)
    batch.loss(logits).backward()
    assert not logits.grad.any()


def test_groups_share_inside_only():
    sequences = [np.arange(20) for _ in range(4)]
    packer = TreePacker(100, make_model("llama")(), min_shared_tokens=8)
    (batch,) = packer.pack(sequences, ones(sequences))
    assert batch.num_tokens == 20
    (batch,) = packer.pack(sequences, ones(sequences), ["a", "b", "a", "b"])
    assert (batch.num_tokens, batch.num_path_tokens, batch.num_recomputed_tokens) == (40, 80, 0)


def test_rows_without_labels_have_no_logits():
    sequences = [np.arange(30), np.concatenate([np.arange(20), np.arange(60, 70)])]
    weights = [np.arange(30) >= 20, np.arange(30) >= 20]
    model = make_model("llama")()
    (batch,) = TreePacker(100, model, min_shared_tokens=8).pack(sequences, weights)
    logits = model(**batch.inputs).logits
    assert logits.shape[1] == 19, "one for both branches, nine in each"
    own = dict(batch.inputs)
    del own["logits_to_keep"]
    whole = model(**own).logits
    assert whole.shape[1] == 40
    for place, found in batch.path_logps(whole).items():
        assert torch.equal(found, batch.path_logps(logits)[place])
        assert not found[:19].any()
        assert found[19:].all()
    with pytest.raises(ConfigError, match="logits have 7 rows, the micro-batch 40 tokens, 19 of which"):
        batch.path_logps(whole[:, :7])


def test_gradients_of_half_precision_logits_are_rounded_once(monkeypatch):
    """In chunks of two rows; a row with two labels, two of them alike."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randn(1, 5, 50, generator=rng)
    logits[0, 2, 7] = 12.0  # all but certain
    monkeypatch.setattr(tree_packer, "_CHUNK_BYTES", 2 * 50 * 4)
    rows, targets = torch.tensor([0, 2, 2, 3, 3, 4]), torch.tensor([3, 7, 1, 4, 4, 0])
    given = logits[0].bfloat16().requires_grad_()
    found = tree_packer._LabelLogps.apply(given, rows, targets)
    (found * torch.arange(1, 7)).sum().backward()
    exact = given.detach().double().requires_grad_()
    expected = torch.log_softmax(exact, -1)[rows, targets]
    (expected * torch.arange(1, 7)).sum().backward()
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(given.grad.double(), exact.grad, rtol=2**-8, atol=1e-6)


class OwnModel(nn.Module):
    """What docs/trees.md shows: one layer whose attention is `tree_attention`."""

    def __init__(self, attends=tree_attention):
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCAB, 16), nn.Embedding(99, 16)
        self.qkv, self.head, self.attends = nn.Linear(16, 48), nn.Linear(16, VOCAB), attends

    def forward(self, input_ids, position_ids, **inputs):
        hidden = self.embed(input_ids) + self.place(position_ids)
        q, k, v = (one.view(-1, 2, 8) for one in self.qkv(hidden[0]).chunk(3, -1))
        return self.head(hidden + self.attends(q, k, v, inputs, window=6).reshape(hidden.shape))


def test_a_model_of_ones_own_attends_by_tree_attention():
    torch.manual_seed(0)
    model = OwnModel().double()
    packer, sequences = TreePacker(500, model, min_shared_tokens=1), random_sequences(5)
    loss = clipped(sequences)
    total = sum(loss(batch.path_logps(model(**batch.inputs))) for batch in packer.pack(sequences, ones(sequences)))
    total.backward()
    found = total.item(), {name: one.grad.clone() for name, one in model.named_parameters()}
    model.zero_grad()
    each = [packer.pack([one], ones([one]))[0] for one in sequences]
    total = loss({place: batch.path_logps(model(**batch.inputs))[0] for place, batch in enumerate(each)})
    total.backward()
    assert worst_error(found, (total.item(), {name: one.grad for name, one in model.named_parameters()})) < LIMIT


def plain_causal(q, k, v, inputs, *, window=0):
    q, k, v = (one.transpose(0, 1) for one in (q, k, v))
    return nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1)


class Averaging(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden.cumsum(1) / 9)


def refused_models():
    own = {"hidden_size": 32, "num_hidden_layers": 2}
    for kind in RECURRENT_KINDS:
        yield kind, lambda kind=kind: AutoModelForCausalLM.from_config(tiny_config(kind)), "has layers"
    yield "sinks", lambda: AutoModelForCausalLM.from_config(tiny_config("gpt_oss", **own)), "attends with s_aux"
    yield "caps", lambda: AutoModelForCausalLM.from_config(tiny_config("gemma2", **own)), "caps attention scores at 3"
    balance = {"output_router_logits": True}
    yield (
        "balance",
        lambda: AutoModelForCausalLM.from_config(tiny_config("mixtral", **balance)),
        "output_router_logits = F",
    )
    yield "dropout", lambda: AutoModelForCausalLM.from_config(tiny_config("gpt2", resid_pdrop=0.1)), "has dropout in"
    dropout = {"attention_dropout": 0.1}
    yield (
        "attention dropout",
        lambda: AutoModelForCausalLM.from_config(tiny_config("llama", **dropout)).train(),
        "dropout = 0.1",
    )
    small = {"d_model": 16, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "vocab_size": 50}
    yield "encoder", lambda: T5ForConditionalGeneration(T5Config(**small)), "is an encoder-decoder"
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "vocab_size": 50,
    }
    nemotron = NemotronConfig(**sizes, num_key_value_heads=2, pad_token_id=None, bos_token_id=None, eos_token_id=None)
    yield "passes nothing on", lambda: AutoModelForCausalLM.from_config(nemotron), "cannot run a micro-batch of trees"
    yield "own attention", lambda: OwnModel(plain_causal), "lets a path see its sibling"
    yield "no arguments", lambda: nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 9)), "let it take TreeBatch.inputs"
    yield "no tokens", lambda: nn.Linear(4, 9), "has no nn.Embedding of tokens"


def from_row_to_row():
    model = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.model.layers[0].mlp = Averaging(model.model.layers[0].mlp)
    return model


@pytest.mark.parametrize(
    ("make", "reason"),
    [pytest.param(make, reason, id=name) for name, make, reason in refused_models()]
    + [pytest.param(from_row_to_row, "lets a path see its sibling", id="a layer of another kind")],
)
def test_a_model_that_it_cannot_serve_is_refused(make, reason):
    model = make()
    with pytest.raises(UnsupportedModelError, match=reason):
        TreePacker(100, model)
    if hasattr(model, "config"):
        assert model.config._attn_implementation != "evenload_tree"


def test_attention_in_chunks_is_refused():
    from transformers import Llama4ForCausalLM, Llama4TextConfig

    sizes = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "intermediate_size_mlp": 32,
        "num_hidden_layers": 2,
        "head_dim": 8,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 50, "attention_chunk_size": 8}
    config = Llama4TextConfig(**sizes, **heads, num_local_experts=2, pad_token_id=None)
    with pytest.raises(UnsupportedModelError, match="in chunks of 8 tokens"):
        TreePacker(100, Llama4ForCausalLM(config))


def test_wrong_input_is_told_with_what_to_do():
    model = make_model("llama")()
    for limits in (
        {"max_tokens": 0},
        {"max_tokens": 5, "min_shared_tokens": 0},
        {"max_tokens": 5, "tree_labels": "all"},
    ):
        with pytest.raises(ConfigError, match="give"):
            TreePacker(model=model, **limits)
    packer = TreePacker(8, model)
    with pytest.raises(ConfigError, match="sequence 1 has 9 tokens, a micro-batch at most max_tokens = 8; raise it"):
        packer.pack([range(3), range(9)], [np.ones(3), np.ones(9)])
    with pytest.raises(ConfigError, match="1 sequences have 2 groups"):
        packer.pack([range(3)], [np.ones(3)], [1, 2])
    with pytest.raises(DataError, match="sequence 1 has tokens of shape"):
        packer.pack([range(3), []], [np.ones(3), []], [1, 2])
    assert packer.pack([], []) == []


def test_a_group_that_must_stay_whole_is_packed_whole_or_refused():
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, 6)
    pairs = [np.concatenate([prompt, rng.integers(0, VOCAB, n)]) for n in (4, 4, 5, 4)]
    packer = TreePacker(14, make_model("llama")(), min_shared_tokens=2)
    batches = packer.pack(pairs[:2], ones(pairs[:2]), ["a", "a"], whole_groups=True)
    assert [sorted(batch.sequences) for batch in batches] == [[0, 1]]
    assert len(packer.pack(pairs, ones(pairs), ["a", "a", "b", "b"])) == 3
    message = r"group 'b' has 15 unique tokens in 2 sequences, a micro-batch at most max_tokens = 14; raise it"
    with pytest.raises(ConfigError, match=message):
        packer.pack(pairs, ones(pairs), ["a", "a", "b", "b"], whole_groups=True)
    apart = [rng.integers(0, VOCAB, 8) for _ in range(2)]
    assert len(packer.pack(apart, ones(apart))) == 2
    with pytest.raises(ConfigError, match="group None has 16 unique tokens"):
        packer.pack(apart, ones(apart), whole_groups=True)


def test_a_model_gets_its_attention_back():
    model = make_model("llama")()
    ids = torch.arange(12)[None]
    expected = model(ids).logits
    packer = TreePacker(100, model)
    TreePacker(50, model)
    with pytest.raises(ConfigError, match=r"packer\.paused"):
        model(ids)
    with packer.paused():
        assert torch.equal(model(ids).logits, expected)
        assert model.generate(ids, max_new_tokens=2, do_sample=False).shape == (1, 14)
    assert model.config._attn_implementation == "evenload_tree"
    assert "evenload_tree" not in model.config.to_json_string(), "it is not saved"
    for other in (copy.deepcopy(model), type(model)._from_config(model.config, dtype=torch.float64)):
        with TreePacker(50, other).paused():
            assert other.config._attn_implementation == "sdpa"
            other(ids)


def bottom_right(query, key, value, cu_q, cu_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False):
    """torch's `varlen_attn` by its documentation, and its limits: one width, bounds, whole numbers of 32 bits."""
    assert query.shape[-1] == key.shape[-1] == value.shape[-1]
    assert cu_q.dtype == cu_k.dtype == torch.int32
    (left, right), found = window_size, []
    for a, b, lo, hi in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True):
        assert b - a <= max_q
        assert hi - lo <= max_k
        distance = torch.arange(hi - lo - (b - a), hi - lo)[:, None] - torch.arange(hi - lo)
        seen = (distance >= -right) & ((distance <= left) if left >= 0 else True)
        given = (one.transpose(0, 1)[None] for one in (query[a:b], key[lo:hi], value[lo:hi]))
        made = nn.functional.scaled_dot_product_attention(*given, seen, scale=scale, enable_gqa=enable_gqa)
        found.append(made[0].transpose(0, 1))
    return torch.cat(found)


@pytest.mark.parametrize("kind", ["qwen3, groups of heads, tied", "mistral, window", "deepseek_v3, latent attention"])
def test_a_kernel_with_cumulative_lengths_gives_the_same(kind, monkeypatch):
    name, changes = KINDS[kind]
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", bottom_right)
    monkeypatch.setattr(attention_module, "_has_kernel", lambda query: True)
    sequences = random_sequences(1)
    given = make_model(name, **changes), sequences, ones(sequences), clipped(sequences)
    assert error_of(*given) < LIMIT


class Wrapper(nn.Module):
    """As DistributedDataParallel and adapters: passes on what it is given."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **given):
        return self.module(*args, **given)


@pytest.mark.filterwarnings("ignore:.(is_)?gradient_checkpointing:FutureWarning")
def test_checkpointed_layers_and_wrappers_are_served():
    sequences = random_sequences(6)
    make = make_model("llama")
    assert error_of(lambda: Wrapper(make()), sequences, ones(sequences), clipped(sequences)) < LIMIT

    def make_adapted():
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        return peft.get_peft_model(make(), config).double()

    peft = pytest.importorskip("peft")
    assert error_of(make_adapted, sequences, ones(sequences), clipped(sequences)) < LIMIT

    def make_checkpointed():
        model = make().train()
        model.gradient_checkpointing_enable()
        return model

    assert error_of(make_checkpointed, sequences, ones(sequences), clipped(sequences)) < LIMIT


def test_turns_that_are_prefixes_of_each_other_are_one_range_of_rows():
    """2,000 of them, beyond Python's recursion limit; no key is copied."""
    turns = 2000
    tokens = np.random.default_rng(0).integers(0, VOCAB, 2 * turns)
    sequences = [tokens[: 2 * at + 2] for at in range(turns)]
    (batch,) = TreePacker(9999, make_model("llama")(), min_shared_tokens=1).pack(sequences, ones(sequences))
    assert batch.num_tokens == 2 * turns
    assert batch.inputs["cu_seq_lens_q"].tolist() == [0, 2 * turns]
    assert batch.inputs["key_index"].tolist() == list(range(2 * turns))


def test_it_needs_torch_and_numpy_only():
    program = """
        import sys
        for blocked in "transformers pyarrow jinja2 tokenizers typer rich fsspec scipy safetensors msgspec".split():
            sys.modules[blocked] = None  # which makes its import fail
        import evenload
        print(evenload.TreePacker.__name__, evenload.tree_attention.__name__)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["TreePacker", "tree_attention"], done.stderr[-2000:]


def test_groups_may_be_a_tensor():
    packer = TreePacker(1 << 12, make_model("llama")(), min_shared_tokens=4)
    sequences = [[1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 7]]
    weights = [np.ones(6)] * 2
    shared, apart = (packer.pack(sequences, weights, torch.tensor(one)) for one in ([3, 3], [3, 4]))
    assert [sum(one.num_tokens for one in batches) for batches in (shared, apart)] == [7, 12]
