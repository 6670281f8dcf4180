"""Several ranks on one GPU, in float64: streams, receives, copies and groups of the executor against plain training.

NCCL refuses two ranks on a device, so transfers go through the host (`staged_group`). Attention is `reference`, which
knows float64; tests/gpu/test_varlen_kernels.py has the kernels.
"""

import pytest
import torch

from dist_equality import assert_plans_equal_plain
from staged_cases import CASES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; torch.cuda.is_available() is false"),
    pytest.mark.filterwarnings("default::UserWarning"),
]


@pytest.mark.parametrize("case", CASES)
def test_ranks_on_one_gpu_equal_plain_training(gloo_pool, case):
    plans, settings = CASES[case]()
    assert_plans_equal_plain(gloo_pool, plans, staged_on="cuda:0", **settings)
