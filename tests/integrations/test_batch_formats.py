"""A pack in the names of each ecosystem."""

import sys

import numpy as np
import pytest
import torch

from evenload.data.encoders import IGNORE_INDEX
from evenload.errors import ConfigError
from evenload.feed.collate import collate_pack
from evenload.integrations.batch_formats import (
    VarlenMetadata,
    format_pack,
    hf_batch,
    megatron_packed_seq_params,
    move_batch,
)
from evenload.integrations.engine_loop import model_inputs
from evenload.integrations.packed_loader import pad_pack, zero_weight_pack
from evenload.types.document import MicroPack, Slice
from packed_cases import documents_of, gradient_of, packed_loss, reference_gradient, tiny_model

DOCUMENTS = {7: [5, 6, 7], 8: [9], 9: [1, 2, 3, 4]}


def pack_of(documents, pad_to=0):
    slices = tuple(Slice(doc_id=doc_id, start=0, stop=len(tokens)) for doc_id, tokens in documents.items())
    tokens = {doc_id: np.array(tokens, np.int32) for doc_id, tokens in documents.items()}
    return collate_pack(MicroPack(index=0, direction="forward", slices=slices, pad_to=pad_to), tokens)


def test_hf_names_and_labels():
    """`DataCollatorWithFlattening(return_flash_attn_kwargs=True)` gives the same."""
    transformers = pytest.importorskip("transformers")
    batch = hf_batch(pack_of(DOCUMENTS), 5)
    collator = transformers.DataCollatorWithFlattening(
        return_flash_attn_kwargs=True, return_seq_idx=True, return_tensors="pt"
    )
    expected = collator([{"input_ids": tokens} for tokens in DOCUMENTS.values()])
    for key, value in expected.items():
        if torch.is_tensor(value):
            assert batch[key].dtype == value.dtype, key
            assert batch[key].tolist() == value.tolist(), key
        else:
            assert batch[key] == value, key
    assert set(batch) - set(expected) == {"num_items_in_batch", "use_cache"}
    assert (batch["num_items_in_batch"].item(), batch["use_cache"]) == (5, False)
    assert documents_of(batch) == [tuple(tokens) for tokens in DOCUMENTS.values()]


IDS, POSITIONS, EDGES = [5, 6, 7, 9, 1, 2, 3, 4], [0, 1, 2, 0, 0, 1, 2, 3], [0, 3, 4, 8]
TARGETS = [6, 7, IGNORE_INDEX, IGNORE_INDEX, 2, 3, 4, IGNORE_INDEX]
VARLEN = {"cu_seq_q": EDGES, "cu_seq_k": EDGES, "max_q": 4, "max_k": 4}
NAMES = {
    "varlen": {"input_ids": IDS, "targets": TARGETS, "positions": POSITIONS, "num_label_tokens": 5} | VARLEN,
    # torchtitan's loss takes labels as they are: shifted, -100 ignored.
    "torchtitan": (
        {"input": [IDS], "positions": [POSITIONS], "attention_masks": (*VARLEN.values(), tuple(EDGES))},
        [TARGETS],
    ),
    "megatron": {
        "tokens": [IDS],
        "position_ids": [POSITIONS],
        # Masked labels must be valid ids: the vocabulary-parallel loss looks them up.
        "labels": [[6, 7, 0, 0, 2, 3, 4, 0]],
        "loss_mask": [[1, 1, 0, 0, 1, 1, 1, 0]],
        "attention_mask": None,
        "packed_seq_params": {"qkv_format": "thd"}
        | {"cu_seqlens_q": EDGES, "cu_seqlens_kv": EDGES, "max_seqlen_q": 4, "max_seqlen_kv": 4},
        "num_label_tokens": 5,
    },
}


@pytest.mark.parametrize("format", NAMES)
def test_names_and_labels_of_a_format(format):
    def plain(part):
        if torch.is_tensor(part):
            assert part.dtype == (torch.int32 if part.tolist() == EDGES else part.dtype)
            return part.tolist()
        if isinstance(part, dict):
            return {name: plain(value) for name, value in part.items()}
        assert not hasattr(part, "dtype"), "host integers, so that no kernel waits for the device"
        return tuple(map(plain, part)) if isinstance(part, tuple) else part

    batch = format_pack(pack_of(DOCUMENTS), format, 5)
    assert plain(batch) == NAMES[format]
    assert VarlenMetadata._fields == (*VARLEN, "cu_seq_q_host")
    assert format != "megatron" or batch["loss_mask"].dtype == torch.float32


def test_megatron_accepts_the_fields_and_without_it_the_error_says_so(monkeypatch):
    batch = format_pack(pack_of(DOCUMENTS), "megatron", 5)
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "megatron.core.packed_seq_params", None)
        with pytest.raises(ConfigError, match="megatron-core, which is not installed"):
            megatron_packed_seq_params(batch)
    pytest.importorskip("megatron.core.packed_seq_params")
    params = megatron_packed_seq_params(batch)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_kv.tolist() == [0, 3, 4, 8]


def test_padding_has_no_label_and_stays_in_its_document():
    batch = hf_batch(pack_of({1: [5, 6], 2: [7, 8, 9]}, pad_to=3), 3)
    assert batch["labels"].tolist() == [[IGNORE_INDEX, 6, IGNORE_INDEX, IGNORE_INDEX, 8, 9]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 6]


def test_moving_a_batch_moves_every_tensor_and_no_integer():
    for format in ("hf", "varlen", "torchtitan", "megatron"):
        batch = format_pack(pack_of(DOCUMENTS), format, 5)
        moved = move_batch(batch, "meta")
        leaves = list(zip(_leaves(batch), _leaves(moved), strict=True))
        assert {after.device.type for _, after in leaves if torch.is_tensor(after)} == {"meta"}
        assert all(torch.is_tensor(after) or after == before for before, after in leaves)
        assert type(moved) is type(batch)


def _leaves(batch):
    parts = batch.values() if isinstance(batch, dict) else batch
    return [leaf for part in parts for leaf in _leaves(part)] if isinstance(batch, dict | tuple) else [batch]


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_documents_of_a_pack_do_not_see_each_other_in_a_model(attention):
    """The most-cited defect of packing: nothing warns, the loss looks fine (trl#805, unsloth#126)."""
    model = tiny_model()
    model.set_attn_implementation(attention)
    documents = {1: [3, 4, 5], 2: [6], 3: [8, 9, 10, 11, 12]}
    inputs = model_inputs(hf_batch(pack_of(documents), 1))
    packed = model(**inputs).logits[0]
    alone = torch.cat([model(input_ids=torch.tensor([tokens])).logits[0] for tokens in documents.values()])
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)
    seen = model(input_ids=inputs["input_ids"]).logits[0]
    assert (seen - alone).abs().max() > 1e-2  # what seeing each other would do


def test_a_zero_weight_pack_has_a_gradient_of_zeros():
    """Every rank must run a backward pass, also one without work."""
    model = tiny_model()
    model(**hf_batch(zero_weight_pack(), 5)).loss.backward()
    gradient = gradient_of(model)
    assert gradient.shape[0] == sum(parameter.numel() for parameter in model.parameters())
    assert not gradient.any()


@pytest.mark.parametrize("num_tokens", [6, 7, 8])
def test_a_padded_pack_has_the_gradients_of_its_documents(num_tokens):
    """What sequence parallelism needs: a length that the ranks divide, and nothing else changed."""
    model = tiny_model()
    documents = {1: [3, 4, 5], 2: list(range(6, 6 + num_tokens - 3))}
    loss, gradient = reference_gradient(model, documents.values())
    model.zero_grad()
    pack = pad_pack(pack_of(documents), 8)
    assert pack.num_tokens == 8
    assert pack.num_padding_tokens == 8 - num_tokens
    assert pack.cu_seqlens_q.tolist() == ([0, 3, num_tokens, 8] if num_tokens < 8 else [0, 3, 8])
    result = packed_loss(model, hf_batch(pack, num_tokens - 2))
    result.backward()
    assert result.item() == pytest.approx(loss, rel=1e-12)
    torch.testing.assert_close(gradient_of(model), gradient, rtol=1e-10, atol=1e-14)


def test_a_long_padding_starts_at_position_zero():
    pack = pad_pack(pack_of({1: [5, 6]}), 8)
    assert pack.positions.tolist() == [0, 1, 0, 1, 2, 3, 4, 5]
    assert (pack.max_seqlen_q, pack.max_seqlen_k) == (6, 6)
    assert pack.cu_seqlens_k.dtype == np.int32
