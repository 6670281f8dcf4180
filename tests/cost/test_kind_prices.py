"""Layers of several kinds cost what each of them costs: seconds, bytes, parameters, and what a chunk lets a row see."""

import msgspec
import numpy as np
import pytest

from cost_samples import mixed_model, sample_coefficients, sample_model
from evenload.cost.layer_counts import forward_flops, kind_shares
from evenload.cost.memory import byte_rates, unit_parameters
from evenload.cost.pack_cost import PackCosts
from evenload.errors import ConfigError
from evenload.types.cluster import LinkSpec
from evenload.types.columns import SliceColumns, causal_pairs
from evenload.types.layer_kind import AttentionKind, ExpertsKind, LayerKind, Product
from evenload.types.layout import even_layout
from evenload.types.model import ModelSpec

DENSE, EXPERTS = sample_model(num_layers=1), sample_model(num_layers=1, num_experts=4, experts_per_token=2)
BOTH = msgspec.structs.replace(DENSE, kinds=(*DENSE.kinds, *EXPERTS.kinds), layers=(0, 1, 1))


def stages(model: ModelSpec) -> PackCosts:
    """Every layer is a stage."""
    return PackCosts(model, sample_coefficients(), even_layout(model.num_layers, pp=model.num_layers))


def test_a_stage_adds_up_its_layers() -> None:
    apart, whole = byte_rates(BOTH, even_layout(3, pp=3)), byte_rates(BOTH, even_layout(3))
    np.testing.assert_array_equal(whole.chunk[:, 0], apart.chunk.sum(axis=1))
    assert whole.kv.tolist() == [apart.kv.sum()]
    assert apart.chunk[0, 0] == byte_rates(DENSE, even_layout(1)).chunk[0, 0] - 2 * 8, "but the final hidden states"
    assert apart.chunk[0, 2] == byte_rates(EXPERTS, even_layout(1)).chunk[0, 0]
    assert whole.backward_temp[0, 0] == apart.backward_temp[0].max(), "one layer at a time"
    stored, _ = unit_parameters(BOTH, 1)
    assert stored.tolist()[1:-1] == [one.kinds[0].parameters for one in (DENSE, EXPERTS, EXPERTS)]
    assert BOTH.num_parameters == stored.sum()


def test_seconds_are_shares_of_the_mean_layer() -> None:
    """What is measured is a mean, so all layers together take what as many mean layers do."""
    costs, mean = stages(BOTH), PackCosts(DENSE, sample_coefficients(), even_layout(1))
    shares = kind_shares(BOTH)
    assert shares.linear @ np.array(BOTH.kind_counts) == pytest.approx(3)
    assert shares.linear[1] / shares.linear[0] == pytest.approx((192 + 2 * 384) / (192 + 384))
    assert shares.attention.tolist() == shares.keys.tolist() == [1, 1]
    packs = SliceColumns.from_ranges([[(0, 0, 9), (1, 3, 10)]])
    of_mean, layers = mean.pack_seconds(packs, "forward"), costs.pack_seconds(packs, "forward")
    assert layers.sum() - 0.5 * 16 == pytest.approx(3 * (of_mean[0, 0] - 0.5 * 16)), "the embedding's seconds are once"
    assert layers[0, 1] == pytest.approx(layers[0, 2])
    np.testing.assert_allclose(
        stages(sample_model()).stage_seconds["forward"][:, 1], mean.stage_seconds["forward"][:, 0] - [0.5, 0, 0, 0, 0]
    )


def test_experts_over_tensor_ranks_pay_their_rows_and_one_product_again() -> None:
    """Two chosen experts of four: half of a pack's 4 tokens are a rank's, each sent twice, half of that to the other;
    8 channels of 2 bytes, 100 bytes/s, 0.25 s a call. One block is left, of two rings forward and three backward."""
    links = {"intra_node": LinkSpec(bandwidth_bytes_per_s=100.0, latency_s=0.25), "devices_per_node": 2}
    coefficients = sample_coefficients(**links, tensor_exposed_share=0.5)
    whole, split = (PackCosts(EXPERTS, coefficients, even_layout(1, tp=tp)) for tp in (1, 2))
    ring_s, rows_s = 0.5 * 4 * 16 / 2 / 100.0, 4 / 2 * 2 / 2 * 16 / 100.0
    transfers_s = {"forward": 2 * (ring_s + 0.25) + 2 * rows_s + 3 * 0.25}
    transfers_s["backward"] = 3 * (ring_s + 0.25) + 3 * rows_s + 6 * 0.25
    again_s = {"forward": 0.0, "backward": 4 * 1.0 * (2 * 2 * 8 * 16 / 960) / 2}
    for way, transfer_s in transfers_s.items():
        one, two = (costs.stage_seconds[way][:, 0] for costs in (whole, split))
        assert 4 * two[0] + two[2] == pytest.approx(4 * one[0] / 2 + one[2] + transfer_s + again_s[way])


def test_work_is_that_of_every_kind() -> None:
    for tokens in (1, 7, 100):
        head = 2 * 8 * 32 * tokens
        apart = sum(forward_flops(one, tokens) - head for one in (DENSE, EXPERTS, EXPERTS))
        assert forward_flops(BOTH, tokens) == pytest.approx(apart + head)


def test_layers_without_attention_keep_no_keys_and_pay_no_pairs() -> None:
    model = mixed_model()
    costs, rates = stages(model), byte_rates(model, even_layout(3, pp=3))
    assert rates.kv.tolist() == [2 * 2 * 4, 2 * 2 * (6 + 4), 0]
    assert rates.kv_gradient.tolist() == [4 * 2 * 4, 4 * 2 * (6 + 4), 0]
    assert costs.windows == (-24, 16)
    forward = costs.stage_seconds["forward"]
    assert (forward[3:, 2] == 0).all()
    assert (forward[3:5, 0] == 0).all()
    assert forward[3, 1] / forward[5, 0] == pytest.approx(2 * (6 + 4) / (2 * 2 * 4)), "by the widths of heads"


@pytest.mark.parametrize(("start", "stop"), [(0, 1), (0, 24), (0, 25), (20, 30), (24, 48), (3, 100)])
def test_a_chunk_shows_a_row_its_own_chunk(start: int, stop: int) -> None:
    """Counted one by one."""
    seen = sum(row % 24 + 1 for row in range(start, stop))
    assert causal_pairs(start, stop, -24) == seen
    packs = SliceColumns.from_ranges([[(0, start, stop)]])
    features = stages(mixed_model(mixer="")).features.of_packs(packs)
    assert features[0, 3] == seen
    assert features[0, 4] == start % 24


def test_documents_of_a_mixer_are_not_cut_or_shared() -> None:
    costs = stages(mixed_model())
    with pytest.raises(ConfigError, match="has Mixer, which mixes tokens in a way of its own"):
        costs.pack_seconds(SliceColumns.from_ranges([[(0, 3, 9)]]), "forward")
    with pytest.raises(ConfigError, match="has Mixer, which needs documents whole"):
        PackCosts(mixed_model(), sample_coefficients(), even_layout(3, cp=2))
    assert "Mixer" in mixed_model().whole_documents
    assert not mixed_model(mixer="").whole_documents


def test_heads_of_every_kind_divide_over_tensor_ranks() -> None:
    model = mixed_model()
    odd = msgspec.structs.replace(model.kinds[1].attention, heads=3, kv_heads=3)
    kinds = (model.kinds[0], msgspec.structs.replace(model.kinds[1], attention=odd), model.kinds[2])
    with pytest.raises(
        ConfigError, match=r"2, 3 query and 1, 3 key/value heads of tiny do not divide over tp=2; .* tp=1$"
    ):
        PackCosts(msgspec.structs.replace(model, kinds=kinds), sample_coefficients(), even_layout(3, tp=2))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"products": (Product(name="q_proj", inputs=0, outputs=3),)}, "q_proj inputs is 0, must be at least 1"),
        ({"attention": AttentionKind(heads=3, kv_heads=2, head_dim=4, value_dim=4)}, "3 query heads do not divide"),
        ({"attention": AttentionKind(heads=0, kv_heads=2, head_dim=4, value_dim=4)}, "heads is 0"),
        ({"experts": ExpertsKind(count=4, chosen=5, width=8, inner=4)}, "5 experts, which is outside 1..4"),
        ({"copied_parameters": 11}, "10 parameters, 11 of them copied"),
        ({"adapter_parameters": -1}, "-1 of adapters"),
    ],
)
def test_kinds_that_no_layer_has_are_refused(fields, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        LayerKind(**({"products": (), "parameters": 10} | fields))


def test_layers_name_kinds_that_there_are() -> None:
    with pytest.raises(ConfigError, match="its layers are of the kinds"):
        msgspec.structs.replace(DENSE, layers=(0, 1)).__post_init__()
    assert BOTH.with_layers((1,)) == msgspec.structs.replace(EXPERTS)
