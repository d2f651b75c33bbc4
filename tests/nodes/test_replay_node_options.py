"""Options of a replay node, read from the texts of its command line."""

import pytest
from nodes.running import OPTIONS

from dase_grpc.errors import ConfigError
from dase_grpc.nodes.replay_options import ReplayOptions


def parsed(**changes):
    """Options read from the texts of a command line."""
    texts = {
        "run_id": None,
        "listen": "127.0.0.1:0",
        "capacity": "1GB",
        "min_size": 3,
        "seed": 4,
        "metrics_port": 5,
        "metrics_host": "127.0.0.1",
        "insecure": True,
    }
    return ReplayOptions.parse(**{**texts, **changes})


@pytest.mark.parametrize("capacity", ["0", "-5", "x", "", "0kB"])
def test_an_unreadable_capacity_is_a_config_error(capacity):
    with pytest.raises(ConfigError, match="--capacity"):
        parsed(capacity=capacity)


@pytest.mark.parametrize("capacity", ["99999999999999", "900000GiB"])
def test_a_capacity_beyond_any_memory_is_a_config_error_unless_it_is_for_a_disk(capacity, tmp_path):
    with pytest.raises(ConfigError, match=r"--capacity 9.* needs at least .* GiB, .* which has [\d,.]+ GiB"):
        parsed(capacity=capacity)
    assert parsed(capacity=capacity, data_dir=tmp_path).capacity == capacity


def test_a_minimum_beyond_the_capacity_is_a_config_error():
    with pytest.raises(ConfigError, match="--min-size 21 exceeds --capacity 20"):
        parsed(capacity="20", min_size=21)
    assert parsed(capacity="20", min_size=20).min_size == 20


@pytest.mark.parametrize("run_id", [".", "..", "../x", "/tmp/x", "a/b", "/", "a\nb"])
def test_a_run_that_cannot_name_a_folder_is_a_config_error(run_id):
    with pytest.raises(ConfigError, match=r"--run-id.* plain folder name"):
        parsed(run_id=run_id)


def test_a_run_that_is_not_named_gets_a_name_of_its_own():
    first, second = parsed(), parsed()
    assert first.run_id != second.run_id
    assert first == ReplayOptions(
        run_id=first.run_id,
        listen=OPTIONS.listen,
        capacity="1GB",
        min_size=3,
        seed=4,
        metrics_port=5,
        insecure=True,
    )
