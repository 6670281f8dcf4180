"""Examples of engines on two processes: they learn, and go on where they stopped as if they had not."""

import pytest

from engine_examples import losses, write_pages

SHARED = ("--sequence-ranks", 2)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "package", "ranks_after", "before"),
    [
        ("fsdp2_train.py", "torch", 1, ()),
        ("accelerate_train.py", "accelerate", 1, ()),
        ("deepspeed_train.py", "deepspeed", 2, SHARED),
        ("megatron_train.py", "megatron.core", 1, ()),
        ("trl_sft.py", "trl", 2, ()),
    ],
    ids=["fsdp2", "accelerate", "deepspeed", "megatron", "trl"],
)
def test_an_example_learns_and_goes_on_as_if_it_had_not_stopped(tmp_path, name, package, ranks_after, before):
    """Steps after the checkpoint have the losses of a run that never stopped; DeepSpeed's has ranks that share packs
    before it, and none after it and in the whole run."""
    pytest.importorskip(package)
    data = write_pages(tmp_path)
    whole = losses(2, name, data, tmp_path / "whole", 4)
    assert list(whole) == [1, 2, 3, 4]
    assert whole[4] < whole[1]
    first = losses(2, name, data, tmp_path / "parts", 2, *before)
    rest = losses(ranks_after, name, data, tmp_path / "parts", 4)
    assert (list(first), list(rest)) == ([1, 2], [3, 4])
    for step, loss in (first | rest).items():
        assert loss == pytest.approx(whole[step], abs=2e-3)
