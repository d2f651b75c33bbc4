"""The policy server and its client: answers, refusals, health, metrics, and an end that answers first."""

import asyncio
import sys
from contextlib import ExitStack
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import numpy as np
import pytest
from children import ran
from contracts.sentences import refuses
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from inference.policies import ABOUT, acts, rows
from inference.servers import RunningServer, called, client_of, policy_server
from nodes.test_standard_services import Health, health_of
from patience import PATIENCE_S
from replay.wire.services import promptly

from dase_grpc.config.texts import shown
from dase_grpc.errors import (
    AddressError,
    ConfigError,
    DaseError,
    DrainingError,
    EnvironmentSpecError,
    MalformedError,
    OverloadedError,
    UnauthenticatedError,
    UnreachableError,
    UsageError,
)
from dase_grpc.inference.client import PolicyClient
from dase_grpc.launch.serve import SERVICE, ServedPolicy
from dase_grpc.nodes import listener
from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.security.certificates import issue, make_authority, revoke
from dase_grpc.replay.security.identity import Identity
from dase_grpc.replay.wire.addresses import Address


async def begun(server: RunningServer, client: PolicyClient, first: float) -> "asyncio.Future[Any]":
    """A call that the policy, which is held, has begun with."""
    asked = asyncio.ensure_future(called(client.act, rows(first)[0]))
    await called(server.policy.begun.acquire)
    return asked


async def waiting(server: RunningServer, client: PolicyClient, first: float) -> "asyncio.Future[Any]":
    """A call that waits for the policy."""
    asked = asyncio.ensure_future(called(client.act, rows(first)[0]))
    await server.until_waiting(1)
    return asked


async def test_a_client_gets_what_the_policy_answers_for_one_observation_and_for_several():
    async with policy_server() as server:
        with client_of(server) as client:
            one = await called(client.act, rows(3)[0])
            several = await called(client.act, rows(1, 2, 3))
            listed = await called(client.act, [[1, 2, 3]])
            assert (await called(client.act, [1, 2, 3])).tolist() == [6, 1]
            assert await called(lambda: client.description) == ABOUT
    async with policy_server(max_queue=2) as server:
        with client_of(server) as client, refuses(EnvironmentSpecError, "up to 2 go at once"):
            await called(client.act, rows(1, 2, 3))
    assert (one.shape, one.dtype) == ((2,), np.float64)
    assert (one == acts(rows(3))[0]).all()
    assert (several == acts(rows(1, 2, 3))).all()
    assert listed.tolist() == [[6, 1]]


async def test_many_clients_at_once_each_get_their_own():
    async with policy_server() as server:
        with client_of(server) as client:
            with server.policy.held():
                asked = [asyncio.ensure_future(called(client.act, rows(i)[0])) for i in range(8)]
                await called(server.policy.begun.acquire)
            for i, answer in enumerate(await asyncio.gather(*asked)):
                assert (answer == acts(rows(i))[0]).all()
        assert sum(server.policy.sizes) == 8


async def test_what_is_no_observation_is_refused_on_either_side():
    async with policy_server() as server:
        with client_of(server) as client:
            with refuses(EnvironmentSpecError, "observations of shape (1, 2) were given"):
                await called(client.act, [[1, 2]])
            with refuses(MalformedError, "component 0 of observation 1 is nan"):
                await called(client.act, rows(1, np.nan))
        assert server.policy.sizes == []


async def test_a_server_with_too_much_to_do_refuses():
    async with policy_server(max_queue=1) as server:
        with client_of(server) as client:
            with server.policy.held():
                asked = [await begun(server, client, 1), await waiting(server, client, 2)]
                with refuses(OverloadedError, "1 of the 1 observation that may wait"):
                    await called(client.act, rows(3)[0])
            await asyncio.gather(*asked)


async def test_a_call_that_is_too_late_is_given_up_on_both_sides():
    async with policy_server() as server:
        with client_of(server) as client, client_of(server, timeout_s=0.2) as hasty:
            await called(lambda: hasty.description)
            with server.policy.held():
                asked = await begun(server, client, 1)
                with refuses(UnreachableError, "policy server at 127.0.0.1:", "(DEADLINE_EXCEEDED)"):
                    await called(hasty.act, rows(2)[0])
                await server.until_waiting(0)
            await asked
        assert server.policy.sizes == [1]


async def test_a_stream_answers_in_order_and_ends_with_its_first_error():
    async with policy_server() as server:

        def over_streams() -> None:
            with client_of(server) as client:
                with client.stream() as act:
                    for first in range(5):
                        assert (act(rows(first)[0]) == acts(rows(first))[0]).all()
                    assert (act(rows(1, 2)) == acts(rows(1, 2))).all()
                    with refuses(MalformedError, "component 0 of observation 0 is nan"):
                        act(rows(np.nan)[0])
                    with pytest.raises(DaseError):
                        act(rows(1)[0])
                with client.stream() as act:
                    assert (act(rows(7)[0]) == acts(rows(7))[0]).all()

        await called(over_streams)


async def test_a_stream_that_is_not_answered_in_time_is_given_up():
    async with policy_server() as server:

        def over_a_stream() -> None:
            with client_of(server, timeout_s=0.2) as client, client.stream() as act:
                assert client.description == ABOUT
                with server.policy.held(), refuses(UnreachableError, "policy server at", "does not answer"):
                    act(rows(1)[0])

        await called(over_a_stream)


async def test_open_streams_get_their_answer_and_do_not_keep_a_server_that_stops():
    async with policy_server(grace_s=2 * PATIENCE_S) as server:
        with client_of(server) as client, client.stream() as act, client.stream() as idle:
            await called(idle, rows(0)[0])
            await called(server.policy.begun.acquire)
            with server.policy.held():
                asked = asyncio.ensure_future(called(act, rows(1)[0]))
                await called(server.policy.begun.acquire)
                server.stop.set()
            assert (await asked == acts(rows(1))[0]).all()
            await promptly(server.ended)
            for stream in (idle, act):
                with refuses(DrainingError, "the policy server is shutting down"):
                    await called(stream, rows(2)[0])


async def test_a_server_that_stops_answers_first_what_it_was_asked():
    async with policy_server(grace_s=PATIENCE_S) as server, open_channel(server.address) as channel:
        watching = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
        assert (await promptly(watching.read())).status == Health.SERVING
        with client_of(server) as client:
            with server.policy.held():
                asked = [await begun(server, client, 1), await waiting(server, client, 2)]
                server.stop.set()
                assert (await promptly(watching.read())).status == Health.NOT_SERVING
                watching.cancel()
            answers = await asyncio.gather(*asked)
            assert (answers == acts(rows(1, 2))).all()
            await promptly(server.ended)
            with pytest.raises(UnreachableError):
                await called(client.act, rows(3)[0])


async def test_a_call_that_outlasts_the_grace_is_cut_off_and_the_node_ends():
    async with policy_server(grace_s=0.05) as server:
        with client_of(server) as client:
            with server.policy.held():
                asked = await begun(server, client, 1)
                server.stop.set()
                with pytest.raises(DaseError):
                    await asked
            await promptly(server.ended)


async def test_health_and_reflection_know_the_service():
    async with policy_server() as server, open_channel(server.address) as channel:
        for service in ("", SERVICE.full_name):
            assert await health_of(channel, service) == Health.SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {each.name for each in (await promptly(call.read())).list_services_response.service}
        assert listed == {
            SERVICE.full_name,
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        call.cancel()


async def test_metrics_show_calls_batches_and_that_it_is_ready():
    async with policy_server() as server:
        with client_of(server) as client:
            await called(client.act, rows(1, 2))
            with pytest.raises(MalformedError):
                await called(client.act, rows(np.inf))
            with client.stream() as act:
                await called(act, rows(3))
                await called(act, rows(4))
        shown = await server.shows()
        assert await server.shows("readyz") == "ready\n"
    lines = shown.splitlines()
    assert "dase_inference_observations_total 4.0" in lines
    assert "dase_inference_batches_total 3.0" in lines
    assert "dase_inference_queued_observations 0.0" in lines
    assert "dase_inference_wait_seconds_count 3.0" in lines
    for rpc in ("Act", "ActStream"):
        count = 1.0 if rpc == "Act" else 2.0
        assert f'dase_inference_request_duration_seconds_count{{rpc="{rpc}"}} {count}' in lines
    for code, count in (("OK", 1.0), ("INVALID_ARGUMENT", 1.0)):
        call = f'grpc_code="{code}",grpc_method="Act",grpc_type="unary"'
        assert f"grpc_server_handled_total{{{call}}} {count}" in lines
    assert [line for line in lines if line.startswith("dase_replay_")] == []


async def test_it_listens_beyond_loopback_only_with_tls_or_where_it_is_told_to():
    everywhere = Address("0.0.0.0", 0)
    with pytest.raises(AddressError, match="--tls DIR"):
        async with policy_server(listen=everywhere):
            pass
    async with policy_server(listen=everywhere, insecure=True) as server:
        assert server.address.port


async def test_an_address_in_use_is_said():
    async with policy_server() as server:
        with pytest.raises(AddressError, match="in use"):
            async with policy_server(listen=server.address):
                pass


async def test_a_bug_of_the_policy_is_a_failed_call_with_a_traceback_in_the_log(caplog):
    async with policy_server() as server:
        with client_of(server) as client:
            server.policy.fails = True
            with pytest.raises(DaseError, match=r"policy server at .* failed \(UNKNOWN"):
                await called(client.act, rows(1)[0])
    assert any(record.exc_info for record in caplog.records)


async def test_a_client_of_a_policy_that_was_replaced_by_another_says_so():
    other = ServedPolicy(lambda given: given[:, :1], replace(ABOUT, action_shape=(1,)))
    async with policy_server() as server:
        client = client_of(server)
        await called(client.act, rows(1)[0])
    async with policy_server(other, listen=server.address):
        with client, refuses(DaseError, "4 bytes of actions came", "make a new client"):
            await called(client.act, rows(1)[0])


async def test_a_client_that_was_closed_says_so_however_often():
    async with policy_server() as server:
        client = client_of(server)
        await called(client.act, rows(1)[0])
        for _ in range(2):
            client.close()
            with refuses(UsageError, "is closed; make another one"):
                await called(client.act, rows(1)[0])
            with refuses(UsageError, "is closed; make another one"), client.stream():
                pass


async def test_a_stream_gives_each_of_several_threads_its_own_answer():
    async with policy_server() as server:
        with client_of(server) as client, client.stream() as act:
            given = [np.full(3, float(index)) for index in range(200)]
            found = await asyncio.gather(*(called(act, each) for each in given))
            expected = [await called(client.act, each) for each in given]
    assert np.array_equal(found, expected)


@pytest.mark.parametrize(
    ("address", "files", "said"),
    [
        (50052, {}, "50052 is not an address of the form HOST:PORT"),
        (None, {}, "None is not an address of the form HOST:PORT"),
        pytest.param("x:" + "9" * 5000, {}, "9' is not an address of the form HOST:PORT", id="digits"),
        ("127.0.0.1:1", {"tls": 5}, "tls = 5 is no path"),
        ("127.0.0.1:1", {"tls": "x", "token_file": "a\0b"}, "token_file = 'a\\x00b' is no path"),
    ],
)
def test_what_is_no_address_and_no_path_is_refused(address, files, said):
    with refuses(UsageError, said):
        PolicyClient(address, **files)


@pytest.mark.parametrize("seconds", [0, -1, np.nan, np.inf, 1e30, "5", None, 10**5000], ids=shown)
def test_a_time_limit_that_is_none_is_refused(seconds):
    with refuses(ConfigError, "timeout_s = ", "is no time limit"):
        PolicyClient("127.0.0.1:1", timeout_s=seconds)


def test_a_client_in_a_forked_process_is_refused_at_once():
    code = """
import os, sys, dase_grpc
from dase_grpc.errors import UsageError
client = dase_grpc.PolicyClient("127.0.0.1:1")
try:
    client.act([0.0])
except dase_grpc.errors.UnreachableError:
    pass
if os.fork() == 0:
    for call in (lambda: client.act([0.0]), lambda: dase_grpc.PolicyClient("127.0.0.1:1").act([0.0])):
        try:
            call()
        except UsageError as error:
            print(error, flush=True)
    os._exit(0)
os.wait()
"""
    done = ran(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert [line[:32] for line in done.stdout.splitlines()] == ["this process was forked from one"] * 2


def test_a_client_without_a_server_says_that_it_does_not_answer():
    with (
        PolicyClient("127.0.0.1:1") as client,
        refuses(UnreachableError, "the policy server at 127.0.0.1:1 does not answer"),
    ):
        client.act([1.0, 2.0, 3.0])
    with pytest.raises(AddressError):
        PolicyClient("nowhere")


async def test_a_client_whose_certificate_is_withdrawn_is_refused_and_its_stream_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(listener, "DOOR_LOOK_S", 0.01)
    now = datetime.now(UTC)
    make_authority(tmp_path, now=now)
    own = issue(tmp_path, Identity.parse("client"), [], now=now)
    server_files = issue(tmp_path, Identity.parse("replay"), ["127.0.0.1"], now=now)
    crl = revoke(tmp_path, now=now).file
    async with policy_server(tls=server_files, crl=crl) as server:
        with PolicyClient(str(server.address), tls=own) as client, ExitStack() as open_now:
            ask = await called(open_now.enter_context, client.stream())
            await called(ask, rows(1))
            revoke(tmp_path, Identity.parse("client"), now=now)
            async with asyncio.timeout(PATIENCE_S):
                while 'denied_calls_total{reason="revoked"}' not in await server.shows():
                    pass
            for act in (ask, client.act):
                with refuses(UnauthenticatedError, "is withdrawn"):
                    await called(act, rows(1))
        shown = await server.shows()
    assert 'dase_inference_denied_calls_total{reason="revoked"} 2.0' in shown
    assert "dase_inference_revocation_lists_unfit 0.0" in shown
