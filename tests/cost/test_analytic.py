import pytest

from evenload.cost.analytic import analytic_coefficients
from evenload.data.hub import model_from
from evenload.errors import ConfigError
from evenload.types.cluster import cluster_from
from evenload.types.layout import even_layout


def test_analytic_coefficients_equal_hand_arithmetic_for_llama_7b() -> None:
    model, cluster = model_from("llama-7b"), cluster_from("h100x32")
    found = analytic_coefficients(model, cluster, even_layout(32, dp=4, pp=8))
    weights = 4 * 4096 * 4096 + 3 * 4096 * 11008
    matmul = 989e12 * 0.65
    assert found.forward.linear_s_per_token == pytest.approx(2 * weights / matmul)
    assert found.backward.linear_s_per_token == pytest.approx(4 * weights / matmul)
    assert found.forward.attention_s_per_pair == pytest.approx(4 * 4096 / (989e12 * 0.37))
    assert found.backward.attention_s_per_pair == pytest.approx(10 * 4096 / (989e12 * 0.33))
    assert found.forward.pack_s == pytest.approx(20e-6 + 256 * 2 * weights / matmul)
    assert found.head_s_per_token == pytest.approx(6 * 4096 * 32000 / matmul)
    # 32 devices leave a node, so stages talk over the NIC; 4 data ranks are neighbours inside one.
    assert found.p2p_bandwidth_bytes_per_s == 42e9
    assert found.reduce_bandwidth_bytes_per_s == 400e9


def test_layout_larger_than_the_cluster_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs 16 devices"):
        analytic_coefficients(model_from("llama-7b"), cluster_from("h100x8"), even_layout(32, dp=4, pp=4))


def test_attention_is_as_fast_as_the_kernels_that_run() -> None:
    """torch's FlashAttention 2 reaches half of what 3 does on an H100."""
    model, cluster = model_from("llama-7b"), cluster_from("h100x8")
    own, third, other = (
        analytic_coefficients(model, cluster, even_layout(32), backend)
        for backend in ("auto", "varlen_cuda_fa3", "varlen_cuda_fa4")
    )
    assert own.forward.attention_s_per_pair / third.forward.attention_s_per_pair == pytest.approx(0.68 / 0.37)
    assert own.backward.attention_s_per_pair / third.backward.attention_s_per_pair == pytest.approx(0.56 / 0.33)
    assert other == own  # not known of this device
    assert own.forward.linear_s_per_token == third.forward.linear_s_per_token


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"do not divide over tp=3; they do over tp=1, 2, 4, 8, 16, 32$"):
        analytic_coefficients(model_from("llama-7b"), cluster_from("h100x8"), even_layout(32, tp=3))
    # 2 key/value heads, which several ranks may hold copies of.
    with pytest.raises(ConfigError, match=r"do not divide over tp=4; they do over tp=1, 2, 14$"):
        analytic_coefficients(model_from("qwen2.5-0.5b"), cluster_from("h100x8"), even_layout(24, tp=4))
