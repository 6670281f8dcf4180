"""Examples of engines on two processes: they learn, and go on where they stopped."""

import pytest

from engine_examples import losses, write_pages


@pytest.mark.long
def test_fsdp2_learns_and_goes_on_with_other_ranks(tmp_path):
    data = write_pages(tmp_path)
    whole = losses(2, "fsdp2_train.py", data, tmp_path / "whole", 4)
    assert list(whole) == [1, 2, 3, 4]
    assert whole[4] < whole[1]
    first = losses(2, "fsdp2_train.py", data, tmp_path / "parts", 2)
    rest = losses(1, "fsdp2_train.py", data, tmp_path / "parts", 4)
    assert (list(first), list(rest)) == ([1, 2], [3, 4])
    for step, loss in (first | rest).items():
        assert loss == pytest.approx(whole[step], abs=2e-3)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    ("name", "package", "ranks_after"),
    [
        ("accelerate_train.py", "accelerate", 1),
        ("deepspeed_train.py", "deepspeed", 2),
        ("megatron_train.py", "megatron.core", 1),
        ("trl_sft.py", "trl", 2),
    ],
)
def test_others_learn_and_go_on(tmp_path, name, package, ranks_after):
    """That their losses are those of plain training the conformance suite shows."""
    pytest.importorskip(package)
    data = write_pages(tmp_path)
    first = losses(2, name, data, tmp_path / "run", 2)
    rest = losses(ranks_after, name, data, tmp_path / "run", 4)
    assert (list(first), list(rest)) == ([1, 2], [3, 4])
    assert rest[4] < rest[3] < first[1]
