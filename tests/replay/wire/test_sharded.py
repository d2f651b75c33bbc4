"""Where the shards of a replay are, which belong together, and how a batch is split over them."""

import asyncio
import socket

import numpy as np
import pytest
from contracts.sentences import assert_one_sentence, refuses
from hypothesis import given
from hypothesis import strategies as st
from replay.wire.services import serving
from scipy import stats

from dase_grpc.errors import AddressError, ConfigError, UnreachableError
from dase_grpc.replay.buffer.sharding import WHOLE, Shard, missing
from dase_grpc.replay.client.discovery import FoundShard, describe, in_order, require_complete
from dase_grpc.replay.client.sharded_sample import split
from dase_grpc.replay.wire.addresses import Address, ReplayPlace

SIZES = st.lists(st.integers(0, 10**9), min_size=1, max_size=20).filter(any)


def found(index, count=3, *, port=None, **changes):
    known = {"run_id": "r", "incarnation": f"i{index}", "min_size": 5, "capacity": 100, "fingerprint": "f"}
    return FoundShard(Address("h", port or index + 1), Shard(index, count), **{**known, **changes})


@given(rows=st.integers(0, 5_000), sizes=SIZES, seed=st.integers(0, 2**32))
def test_a_split_gives_every_row_to_a_part_that_has_some(rows, sizes, seed):
    counts = split(rows, sizes, np.random.default_rng(seed))
    assert sum(counts) == rows
    assert len(counts) == len(sizes)
    assert all(count == 0 for count, size in zip(counts, sizes, strict=True) if size == 0)


@pytest.mark.parametrize("sizes", [(1, 1), (700, 300), (5, 0, 10, 85), (10**9, 10**9, 2 * 10**9)])
def test_a_split_is_multinomial_over_the_sizes(sizes):
    rng, rows, tries = np.random.default_rng(3), 64, 4_000
    counts = np.array([split(rows, sizes, rng) for _ in range(tries)])
    shares = np.array(sizes) / sum(sizes)
    some = shares > 0
    assert stats.chisquare(counts.sum(0)[some], shares[some] * rows * tries).pvalue > 1e-4
    spread = counts.var(0, ddof=1)[some]
    expected = (rows * shares * (1 - shares))[some]
    assert np.allclose(
        spread, expected, rtol=0.12
    )  # a spread estimated from 4000 tries is within 2 percent or so


def test_a_union_of_nothing_cannot_be_split():
    with pytest.raises(ValueError, match="high <= 0"):
        split(4, [0, 0], np.random.default_rng(0))


@given(order=st.permutations(range(5)))
def test_shards_come_in_the_order_of_the_index_that_they_state(order):
    shards = in_order([found(index, 5) for index in order])
    assert [each.shard.index for each in shards] == [0, 1, 2, 3, 4]
    require_complete(shards)


def test_what_no_learner_has_decided_yet_is_no_difference():
    in_order([found(0, 2), found(1, 2, capacity=0, fingerprint="")])


@pytest.mark.parametrize(
    ("other", "sentence"),
    [
        (found(1, run_id="s"), "run_id is 'r' and 's'"),
        (found(1, 4), "the number of shards is 3 and 4"),
        (found(1, min_size=6), "min_size is 5 and 6"),
        (found(1, capacity=99), "capacity is 100 and 99"),
        (found(1, fingerprint="g"), "schema_fingerprint is 'f' and 'g'"),
        (found(0, port=9), "h:1 and h:9 are both shard 0/3"),
    ],
    ids=["run", "count", "min_size", "capacity", "schema", "doubled"],
)
def test_services_that_are_not_shards_of_one_replay_are_refused_in_one_sentence(other, sentence):
    with pytest.raises(ConfigError) as caught:
        in_order([found(0), other])
    assert_one_sentence(caught.value, sentence)


def test_shards_that_are_left_out_are_named():
    with refuses(ConfigError, "1 of the 4 shards of run 'r' and leaves shards 0/4, 2/4, 3/4 out"):
        require_complete([found(1, 4)])
    assert missing([WHOLE]) is None


def test_places_are_read_and_written_alike():
    one = ReplayPlace.parse("h:1")
    several, named = ReplayPlace.parse("h:1,[::1]:2"), ReplayPlace.parse("dns:replay.run.svc:50051")
    assert one == ReplayPlace.at(Address("h", 1))
    assert one.whole
    assert not several.whole
    assert not named.whole
    assert [str(each) for each in (one, several, named)] == ["h:1", "h:1,[::1]:2", "dns:replay.run.svc:50051"]


@pytest.mark.parametrize("text", ["dns:50051", "dns:1,h:2", "h:2,dns:1"])
def test_a_host_named_dns_is_one_like_others(text):
    place = ReplayPlace.parse(text)
    assert not place.by_name
    assert "dns" in [address.host for address in place.addresses]
    assert str(place) == text


@pytest.mark.parametrize(
    "text",
    ["", "h", "h:1,", "dns:", "dns:h", "h:1,dns:g:2", "dns:h:1,g:2", "h:1,h:1", "dns:a..b:1", "h:1,.g:1"],
)
def test_a_place_that_cannot_be_is_refused(text):
    with pytest.raises(AddressError):
        ReplayPlace.parse(text)


async def test_a_name_gives_all_its_addresses_each_to_be_verified_under_that_name(monkeypatch):
    async def getaddrinfo(host, port, **_):
        assert (host, port) == ("replay", 7)
        kinds = (socket.AF_INET, socket.SOCK_STREAM, 6, "")
        return [(*kinds, (address, port)) for address in ("10.0.0.2", "10.0.0.1", "10.0.0.2")]

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    addresses = await ReplayPlace.parse("dns:replay:7").found()
    assert addresses == tuple(Address(f"10.0.0.{n}", 7, server_name="replay") for n in (1, 2))


async def test_a_name_that_does_not_resolve_counts_as_away(monkeypatch):
    async def getaddrinfo(*_, **__):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", getaddrinfo)
    with pytest.raises(UnreachableError, match=r"the name replay does not resolve \(Name or service"):
        await ReplayPlace.parse("dns:replay:7").found()


async def test_a_service_says_which_shard_it_is():
    async with serving(shard=Shard(1, 2), min_size=3) as service:
        before = await describe(service.channel, service.address)
        await service.join()
        after = await describe(service.channel, service.address)
    assert (before.shard, before.run_id, before.min_size, before.capacity) == (Shard(1, 2), "the-run", 3, 0)
    assert (after.capacity, after.fingerprint != "") == (1_000, True)


async def test_a_service_from_before_there_were_shards_is_a_whole_replay(service, monkeypatch):
    state = "dase_grpc.replay.service.server.buffer_to_proto"
    from dase_grpc.replay.wire.v1 import replay_pb2

    monkeypatch.setattr(state, lambda run: replay_pb2.BufferState(min_size=1))
    assert (await describe(service.channel, service.address)).shard == WHOLE
