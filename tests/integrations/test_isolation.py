"""`check_isolation` finds every known way in which a packed row goes wrong, and passes what is right."""

import re

import pytest
import torch
from transformers import AutoModelForCausalLM

import evenload
from evenload.errors import ConfigError, UnsupportedModelError
from evenload.integrations.engine_loop import EngineLoop
from evenload.integrations.isolation import check_isolation
from hybrid_models import FAMILIES, hybrid_model
from packed_cases import loader_of, write_texts
from reference_training import tiny_config
from sliced_kernels import stand_ins

LENGTHS = (11, 20, 7)
T = sum(LENGTHS)


def packed(**more):
    """Three documents in a row, by everything that says where they begin."""
    edges = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    return {
        "input_ids": (torch.arange(1, T + 1) * 7 % 61)[None],
        "position_ids": torch.cat([torch.arange(n) for n in LENGTHS])[None],
        "cu_seq_lens_q": edges,
        "cu_seq_lens_k": edges,
        "max_length_q": max(LENGTHS),
        "max_length_k": max(LENGTHS),
        "seq_idx": torch.repeat_interleave(torch.arange(3), torch.tensor(LENGTHS)).int()[None],
        "use_cache": False,
    } | more


def only(*names):
    return {key: value for key, value in packed().items() if key in ("input_ids", "use_cache", *names)}


def rows():
    batch, start = packed(), 0
    ids, mask = torch.zeros(3, max(LENGTHS), dtype=torch.long), torch.zeros(3, max(LENGTHS), dtype=torch.long)
    for row, length in enumerate(LENGTHS):
        ids[row, :length] = batch["input_ids"][0, start : start + length]
        mask[row, :length] = 1
        start += length
    return {"input_ids": ids, "attention_mask": mask, "use_cache": False}


def llama(attention="sdpa", **changes):
    torch.manual_seed(0)
    config = tiny_config("llama", vocab_size=61, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation=attention)


def plainly(model, batch):
    return model(input_ids=batch["input_ids"], use_cache=False).logits


@pytest.mark.parametrize("names", [("position_ids",), ("position_ids", "cu_seq_lens_q", "cu_seq_lens_k"), None])
def test_attention_that_reads_boundaries_is_isolated(names):
    found = check_isolation(llama(), packed() if names is None else only(*names))
    assert found, str(found)
    assert (found.num_documents, found.documents, found.notes) == (3, (0, 1, 2), ())
    found.raise_if_leaking()


def test_a_row_as_one_sequence_leaks_and_the_first_line_says_where():
    found = check_isolation(llama(), only(), lengths=LENGTHS)
    assert {(leak.source, leak.target) for leak in found.leaks} == {(0, 1), (0, 2), (1, 2)}
    assert str(found).startswith("Leaks: 2 of 3 documents get something of others, first in model.layers.0.self_attn (")
    assert not found
    with pytest.raises(UnsupportedModelError, match="Leaks: 2 of 3"):
        found.raise_if_leaking()


def test_an_output_that_takes_from_later_documents_leaks_backwards():
    class Mean(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(61, 8), torch.nn.Linear(8, 61)

        def forward(self, input_ids, **_):
            hidden = self.embed(input_ids)
            return self.head(hidden + hidden.mean(1, keepdim=True))

    found = check_isolation(Mean(), packed())
    assert len(found.leaks) == 6


@pytest.mark.parametrize(("share", "is_isolated"), [(3e-6, True), (1e-3, False)])
def test_what_kernels_leave_of_sums_that_cancel_is_no_leak(share, is_isolated):
    """mamba_ssm's kernel left 2.9e-6 on an H200; a gradient that reaches another document is no rounding."""

    class Rounding(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            return hidden.clone()

        @staticmethod
        def backward(ctx, grad):
            return grad + share * grad.norm() / grad.numel() ** 0.5 * torch.ones_like(grad)

    class Scan(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(61, 8), torch.nn.Linear(8, 61)

        def forward(self, input_ids, **_):
            return self.head(Rounding.apply(self.embed(input_ids)))

    assert bool(check_isolation(Scan(), packed(), alone=False)) == is_isolated


def test_a_leak_without_a_gradient_shows_in_logits():
    """Such as embeddings of n-grams by a hash of ids, which run over a boundary."""

    class Hashed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.pairs = torch.nn.Embedding(61, 8), torch.nn.Embedding(61, 8)
            self.head = torch.nn.Linear(8, 61)

        def forward(self, input_ids, **_):
            pairs = (input_ids + input_ids.roll(1, 1)) % 61
            return self.head(self.embed(input_ids) + self.pairs(pairs))

        def get_input_embeddings(self):
            return self.embed

    found = check_isolation(Hashed(), packed())
    assert {(leak.source, leak.target) for leak in found.leaks} == {(0, 1), (1, 2), (2, 0)}
    assert "first in pairs (Embedding)" in str(found)


def test_positions_that_run_on_are_not_as_alone():
    torch.manual_seed(0)
    config = tiny_config("gpt2", vocab_size=61, n_positions=64, embd_pdrop=0.0, attn_pdrop=0.0, resid_pdrop=0.0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    mask = torch.block_diag(*(torch.ones(n, n).tril() for n in LENGTHS)).bool()[None, None]
    wrong = only() | {"position_ids": torch.arange(T)[None], "attention_mask": mask}
    found = check_isolation(model, wrong, lengths=LENGTHS)
    assert not found.leaks
    assert "logits of document 1" in str(found)
    assert str(found).startswith("Not as alone:")
    assert check_isolation(model, wrong | {"position_ids": packed()["position_ids"]}, lengths=LENGTHS)


@pytest.mark.parametrize("kind", FAMILIES)
def test_packed_rows_of_recurrent_layers_leak_or_are_refused_and_a_document_a_row_is_right(kind):
    """Without kernels; as docs/isolation.md says."""
    model = hybrid_model(kind)
    found = check_isolation(model, only("position_ids"))
    assert {leak.target for leak in found.leaks} == {1, 2}, str(found)
    assert all(re.search(r"layers\.0\.(linear_attn|self_attn|mamba|mixer|conv) ", leak.where) for leak in found.leaks)
    no_index = {key: value for key, value in packed().items() if key != "seq_idx"}
    if kind in ("qwen3_next", "qwen3_5_text", "olmo_hybrid"):
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            check_isolation(model, no_index)
    else:
        assert not check_isolation(model, no_index, alone=False)
    if kind == "jamba":
        assert not check_isolation(model, packed(), alone=False)
    else:
        with pytest.raises(ValueError, match="can't keep packed sequences apart"):
            check_isolation(model, packed())
    apart = check_isolation(model, rows())
    assert apart, str(apart)


KEPT_FROM_KERNELS = {
    # Its layers give the mixer no arguments at all.
    "jamba": "layers.0.mamba ",
    # Its kernel reads `cu_seqlens`, the model is given `cu_seq_lens_q`.
    "kimi_linear": "layers.0.self_attn ",
    # Its mask is made without positions, so only flash attention keeps documents apart.
    "granitemoehybrid": "layers.1.self_attn ",
}


@pytest.mark.parametrize("kind", FAMILIES)
def test_what_our_batches_carry_reaches_the_kernels_of_most_families(kind):
    """With functions that read what the kernels behind them read."""
    model = hybrid_model(kind)
    with stand_ins(model):
        found = check_isolation(model, packed())
        assert bool(found) == (kind not in KEPT_FROM_KERNELS), str(found)
        assert all(KEPT_FROM_KERNELS[kind] in leak.where for leak in found.leaks), str(found)
        no_index = {key: value for key, value in packed().items() if key != "seq_idx"}
        assert not check_isolation(model, no_index, alone=False), "convolutions read nothing else"


LEAKS = {"state into the next document", "conv into the next document"}
STATES = {
    "state reset at cuts",
    "gradient of the state dropped at cuts",
    "backward from a zero state",
    "state into the next document",
}
CONVS = {
    "conv tail reset at cuts",
    "gradient of the conv tail dropped at cuts",
    "short slices lose the older tail",
    "conv into the next document",
}
CASES = [(kind, mutant) for kind in ("qwen3_next", "bamba") for mutant in sorted(STATES | CONVS)]
CASES += [("lfm2", mutant) for mutant in sorted(CONVS)]


def check_slices(model, **settings):
    def cut(model, batch):
        with stand_ins(model, cuts=True, **settings):
            return model(**batch).logits

    return check_isolation(model, packed(), run=cut, run_alone=plainly)


@pytest.mark.parametrize("kind", ["qwen3_next", "bamba", "lfm2"])
def test_documents_cut_into_slices_are_right_where_states_go_on(kind):
    found = check_slices(hybrid_model(kind))
    assert found, str(found)


@pytest.mark.parametrize(("kind", "mutant"), CASES, ids=[f"{kind}: {mutant}" for kind, mutant in CASES])
def test_every_known_bug_of_packed_recurrent_layers_is_found(kind, mutant):
    found = check_slices(hybrid_model(kind), mutant=mutant)
    assert not found
    assert bool(found.leaks) == (mutant in LEAKS), str(found)
    if mutant in LEAKS:
        assert all(leak.where for leak in found.leaks)
    if "gradient" in mutant or "backward" in mutant:
        assert all(one.what.startswith("gradient") for one in found.differences), "logits are right"


def test_a_leak_that_gates_hide_shows_where_states_last():
    """The state runs on into the next document, but every token forgets all that was before it."""
    model = hybrid_model("bamba")
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("A_log"):
                weight.fill_(12.0)
    found = check_slices(model, mutant="state into the next document")
    assert found.leaks
    assert all(leak.is_hidden for leak in found.leaks)
    assert "these gates hide it" in found.summary()


def test_nothing_of_the_model_changes():
    model = hybrid_model("qwen3_next").eval()
    model.model.layers[0].train()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    modes, random = [module.training for module in model.modules()], torch.get_rng_state()
    assert not check_isolation(model, only("position_ids"))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), random)
    assert torch.equal(model.lm_head.weight.grad, torch.ones_like(model.lm_head.weight))
    assert all(one.grad is None for one in model.parameters() if one is not model.lm_head.weight)
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_any_precision(dtype):
    assert check_isolation(llama().to(dtype), packed())
    leaking = check_isolation(hybrid_model("bamba").to(dtype), only("position_ids"))
    assert {leak.target for leak in leaking.leaks} == {1, 2}


def test_dropout_is_off_while_documents_are_compared_and_noise_that_stays_is_named():
    model = llama(attention_dropout=0.5)
    found = check_isolation(model, packed())
    assert found, str(found)
    assert found.notes == ()
    assert {one.attention_dropout for one in model.modules() if hasattr(one, "attention_dropout")} == {0.5}

    class Noisy(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = torch.nn.Embedding(61, 8), torch.nn.Linear(8, 61)

        def forward(self, input_ids, **_):
            return self.head(torch.nn.functional.dropout(self.embed(input_ids), 0.5))

    found = check_isolation(Noisy(), packed())
    assert "by dropout or a low precision" in found.notes[0]


@pytest.mark.parametrize(
    ("more", "fix"),
    [
        ({}, "give use_cache=False: then"),
        ({"use_cache": False, "attention_mask": torch.ones(1, T, dtype=torch.long)}, "leave out attention_mask: then"),
    ],
)
def test_what_keeps_transformers_from_splitting_a_row_is_the_fix(more, fix):
    """It splits a row where positions start again, but not with a cache or a mask."""
    batch = {key: value for key, value in only("position_ids").items() if key != "use_cache"} | more
    found = check_isolation(llama(), batch)
    assert len(found.leaks) == 3
    assert fix in found.summary()


def test_labels_of_first_tokens_cross_boundaries():
    labels = packed()["input_ids"].clone()
    assert not (found := check_isolation(llama(), packed(labels=labels)))
    assert found.summary().startswith("Not as alone: the first tokens of 2 documents are labels")
    labels[0, [LENGTHS[0], LENGTHS[0] + LENGTHS[1]]] = -100
    assert check_isolation(llama(), packed(labels=labels))


def test_padding_at_position_0_is_no_document():
    positions = torch.cat([torch.arange(11), torch.arange(20), torch.zeros(7, dtype=torch.long)])[None]
    found = check_isolation(llama(), only() | {"position_ids": positions})
    assert (found.num_documents, bool(found)) == (2, True)


def test_boundaries_that_contradict_each_other_are_told():
    found = check_isolation(llama(), packed(cu_seq_lens_q=torch.tensor([0, 10, 31, 38])))
    assert found.notes == ("positions and the given boundaries of documents differ first at token 10",)


def test_of_many_documents_some_are_looked_at():
    lengths = (3,) * 12 + (2,)
    found = check_isolation(llama(), only(), lengths=lengths, max_documents=3)
    assert found.documents == (0, 6, 12)
    assert {(leak.source, leak.target) for leak in found.leaks} >= {(0, 6), (5, 6), (0, 12)}


@pytest.mark.parametrize(
    ("batch", "lengths", "message"),
    [
        (only(), None, "nothing says where documents begin"),
        (only(), (T,), "holds one document"),
        (only(), (3, 4), "documents have 7 tokens in all, the row 38"),
        (only(), (12, -3, 29), r"lengths are \[12, -3, 29\]; give the tokens"),
        ("text", None, "the batch must be a dict"),
        ({"input_ids": torch.arange(5)}, None, r"a tensor input_ids \[rows, tokens\]"),
        (
            {"input_ids": torch.zeros(1, 4, dtype=torch.long, device="meta")},
            None,
            "input_ids are on meta and the model",
        ),
        (
            {"input_ids": torch.ones(2, 6, dtype=torch.long), "position_ids": torch.tensor([[0, 1, 2, 0, 1, 2]] * 2)},
            None,
            "the batch has 2 rows of several documents",
        ),
    ],
)
def test_batches_that_show_nothing_are_refused(batch, lengths, message):
    with pytest.raises(ConfigError, match=message):
        check_isolation(llama(), batch, lengths=lengths)


def test_it_is_a_name_of_the_package():
    assert evenload.check_isolation is check_isolation


class PlainLoop(EngineLoop):
    """The least that an engine is."""

    def __init__(self, model, loader, loss=None):
        super().__init__(model, loader, loss, engine="plain", device=torch.device("cpu"))

    def _run(self, batch, is_last):
        loss = self._loss(self._called, batch)
        loss.backward()
        return loss

    def update(self):
        return True


def varlen_loss(model, batch):
    """A loss of somebody's own, of the label tokens alone."""
    told = {"position_ids": batch["positions"][None], "cu_seq_lens_q": batch["cu_seq_q"]}
    logits = model(input_ids=batch["input_ids"][None], use_cache=False, **told).logits[0]
    total = torch.nn.functional.cross_entropy(logits, batch["targets"], ignore_index=-100, reduction="sum")
    return total / batch["num_label_tokens"]


@pytest.mark.parametrize("settings", [{}, {"format": "varlen"}, {"pack_multiple": 16}], ids=str)
def test_loops_train_what_keeps_documents_apart_and_refuse_the_rest(tmp_path, settings):
    """By what the model gives for two documents, with the arguments and functions that training has."""
    write_texts(tmp_path)
    loss = varlen_loss if "format" in settings else None

    def first_step(model, **functions):
        with loader_of(tmp_path, **settings) as loader, stand_ins(model, **functions):
            random = torch.get_rng_state()
            found = next(PlainLoop(model, loader, loss).train(1))
            assert torch.equal(torch.get_rng_state(), random)
            return found.loss.item()

    assert first_step(hybrid_model("qwen3", vocab_size=257)) > 0
    for kind in ("bamba", "jamba"):
        model = hybrid_model(kind, vocab_size=257)
        if kind == "bamba" and loss is None:
            assert first_step(model) > 0
            continue
        with pytest.raises(UnsupportedModelError, match="does not keep the documents of a pack apart"):
            first_step(model)
        assert all(weight.grad is None for weight in model.parameters())
