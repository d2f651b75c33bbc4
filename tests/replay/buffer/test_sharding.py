"""Which shard a service is: read from a flag, kept with the data."""

from contextlib import closing

import pytest
from contracts.sentences import refuses
from replay.wire.services import SCHEMA

from dase_grpc.errors import CapacityError, ConfigError, DataDirectoryError
from dase_grpc.nodes.replay_options import ReplayOptions
from dase_grpc.replay.buffer.run import SharedRun
from dase_grpc.replay.buffer.sharding import WHOLE, Shard

COMMAND = {"listen": "127.0.0.1:0", "capacity": "10", "min_size": 1, "seed": 0, "metrics_port": None}


def on_disk(data_dir, shard, *, min_size=1):
    run = SharedRun("r", capacity=10, min_size=min_size, seed=0, ttl_s=10.0, shard=shard)
    return run.keep_in(data_dir, boot_id="", now=0.0)


def options(**changes):
    return ReplayOptions.parse(**{**COMMAND, "run_id": "r", "insecure": False, **changes})


@pytest.mark.parametrize("text", ["", "1", "a/b", "-1/2", "2/2", "0/0", "0/257", "1/2/3", "١/٢"])
def test_a_shard_that_cannot_be_is_refused_by_its_flag(text):
    with pytest.raises(ConfigError, match="--shard"):
        Shard.parse(text)


def test_a_shard_is_read_and_written_alike():
    assert Shard.parse("3/4") == Shard(3, 4)
    assert str(Shard(3, 4)) == "3/4"
    assert Shard(0, 1) == WHOLE


def test_a_min_size_beyond_the_capacity_of_all_shards_is_refused_with_what_these_hold():
    run = SharedRun("r", capacity=10, min_size=21, seed=0, ttl_s=10.0, shard=Shard(1, 2))
    with refuses(CapacityError, "min_size = 21", "20 transitions", "2 shards of replay.capacity = 10 hold"):
        run.join("node", wanted=0, run_id="", schema=SCHEMA, now=0.0)


def test_a_directory_says_which_shard_it_holds_and_is_taken_as_no_other(tmp_path):
    run = on_disk(tmp_path, Shard(1, 2))
    run.join("n", wanted=0, run_id="", schema=SCHEMA, now=0.0)
    run.close()
    with pytest.raises(DataDirectoryError, match="holds shard 1/2 of the replay, not 0/2"):
        on_disk(tmp_path, Shard(0, 2))
    assert options(run_id=None, capacity=None, data_dir=tmp_path).shard == Shard(1, 2)
    again = on_disk(tmp_path, Shard(1, 2))
    assert again.shard == Shard(1, 2)
    again.close()


def test_min_size_is_of_all_shards_together(tmp_path):
    assert options(min_size=20, shard="0/2").min_size == 20
    with pytest.raises(ConfigError, match="exceeds --capacity 10 of each of 2 shards"):
        options(min_size=21, shard="0/2")
    run = on_disk(tmp_path, Shard(0, 2), min_size=21)
    with closing(run), pytest.raises(CapacityError, match=r"replay.min_size = 21"):
        run.join("n", wanted=0, run_id="", schema=SCHEMA, now=0.0)


def test_shards_of_a_run_that_is_not_named_are_refused():
    with pytest.raises(ConfigError, match="needs --run-id, the same at every shard"):
        options(run_id=None, shard="0/2")
