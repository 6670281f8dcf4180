"""Kernels that a pack launches on a GPU, counted as operators on the meta device: none is of a single document.

The host of a GPU needs some microseconds a kernel, so a pack of many short documents with kernels for each would wait
for its host. Views launch nothing. What this counts runs on the meta device by torch's own meta kernels, attention as
one call a layer and direction (`attention.varlen_cuda`).
"""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from evenload.attention.varlen_cuda import VarlenCudaAttention
from evenload.runtime.model.hf_model import build_stage_model
from evenload.runtime.optim.parameter_units import flatten_units
from evenload.runtime.replay.stage import PipelineStage
from evenload.runtime.replay.store import ActivationStore
from reference_training import make_tokens, tiny_config
from single_stage import pack_tokens
from wide_sums import wide_sums


@pytest.fixture(scope="module", autouse=True)
def sums_wider():
    with wide_sums("Meta"):
        yield


TOKENS = 96
NO_KERNEL = ("empty", "empty_strided", "empty_like", "new_empty", "new_empty_strided", "detach", "_unsafe_view")


class Launches(TorchDispatchMode):
    """Operators by name, but for views and memory without values."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        returned = func._schema.returns
        is_view = bool(returned) and all(one.alias_info and not one.alias_info.is_write for one in returned)
        name = func._schema.name.removeprefix("aten::").removeprefix("evenload::")
        if not is_view and name not in NO_KERNEL:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


def launches(kind, num_documents, layers):
    """Operators of a forward and a backward pack of equal documents on a middle stage of so many layers."""
    config = tiny_config(kind, num_hidden_layers=layers + 2)
    meta, length = torch.device("meta"), TOKENS // num_documents
    model = build_stage_model(config, layers=(1, layers + 1), dtype=torch.bfloat16, device=meta, weights=None, seed=3)
    flatten_units(model, dp=1)
    stage = PipelineStage(model, VarlenCudaAttention())
    tokens = make_tokens([length] * num_documents, config.vocab_size)
    ranges = [(doc, 0, length) for doc in range(num_documents)]
    pack = pack_tokens(ranges, tokens, meta)
    store = ActivationStore(dict.fromkeys(range(num_documents), length), [pack.ranges])
    hidden = torch.zeros(TOKENS, config.hidden_size, dtype=torch.bfloat16, device=meta)
    counted = []
    for run in (lambda: stage.forward(pack, hidden, store), lambda: stage.backward(pack, hidden, store, 10)):
        with Launches() as mode:
            run()
        counted.append(mode.counts)
    return counted


# Of those that torch names where its deterministic kernels are asked for; `_flash_attention_backward` and `index_add`
# have such kernels.
FAILS_IF_DETERMINISTIC = {
    *("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward", "bincount"),
    *("histc", "kthvalue", "median", "nll_loss2d_forward", "put_", "scatter_reduce", "_embedding_bag"),
}


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "gpt2"])
def test_layers_run_where_kernels_have_to_be_deterministic(kind):
    """`train.deterministic`: torch refuses others on a GPU."""
    used = {name for counts in launches(kind, 2, 1) for name in counts}
    assert "_flash_attention_backward" in used
    assert not used & FAILS_IF_DETERMINISTIC


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gemma3", "gpt2"])
def test_documents_add_no_kernels(kind):
    few, many = launches(kind, 2, 2), launches(kind, 32, 2)
    assert many == few
