import msgspec
import pytest

from cost_samples import sample_coefficients
from evenload.cost.coefficients import PassCoefficients, read_coefficients, write_coefficients
from evenload.errors import ConfigError


def test_cost_file_round_trips(tmp_path) -> None:
    path = tmp_path / "cost.json"
    write_coefficients(path, sample_coefficients(attention_tile=128))
    assert read_coefficients(path) == sample_coefficients(attention_tile=128)


def test_cost_file_with_unknown_field_is_refused(tmp_path) -> None:
    """A misspelt coefficient must not silently become its default 0."""
    path = tmp_path / "cost.json"
    path.write_bytes(msgspec.json.encode({**msgspec.to_builtins(sample_coefficients()), "head_s": 1.0}))
    with pytest.raises(ConfigError, match="head_s"):
        read_coefficients(path)


def test_missing_cost_file_is_a_config_error(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        read_coefficients(tmp_path / "nowhere.json")


@pytest.mark.parametrize(
    "changes",
    [
        {"head_s_per_token": -1.0},
        {"p2p_bandwidth_bytes_per_s": 0.0},
        {"attention_tile": 0},
        {"forward": PassCoefficients(linear_s_per_token=float("nan"), attention_s_per_pair=0.0)},
    ],
)
def test_impossible_coefficients_are_refused(changes) -> None:
    with pytest.raises(ConfigError):
        sample_coefficients(**changes)
