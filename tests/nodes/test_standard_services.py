"""Health and reflection of a replay node."""

import grpc
import pytest
from google.protobuf import descriptor_pool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from logged import errors_in
from patience import PATIENCE_S
from replay.wire.services import promptly

from dase_grpc.nodes.replay import SERVICES
from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.security.door import PERMISSIONS
from dase_grpc.replay.service.server import REFLECTION_V1

Health = health_pb2.HealthCheckResponse


async def health_of(channel, service=""):
    stub = health_pb2_grpc.HealthStub(channel)
    return (await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=PATIENCE_S)).status


async def test_health_is_serving_for_the_node_and_each_of_its_services(replay):
    async with open_channel(replay.address) as channel:
        for service in ("", *SERVICES):
            assert await health_of(channel, service) == Health.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_of(channel, "dase.v1.Nothing")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_health_lists_the_node_and_each_of_its_services(replay, caplog):
    async with open_channel(replay.address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).List(
            health_pb2.HealthListRequest(), timeout=PATIENCE_S
        )
    assert {name: each.status for name, each in answer.statuses.items()} == dict.fromkeys(
        ("", *SERVICES), Health.SERVING
    )
    assert errors_in(caplog) == []


async def test_every_service_that_reflection_lists_implements_each_of_its_methods(replay, caplog):
    pool = descriptor_pool.Default()
    async with open_channel(replay.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = [pool.FindServiceByName(s.name) for s in (await call.read()).list_services_response.service]
        call.cancel()
        methods = [f"/{service.full_name}/{method.name}" for service in listed for method in service.methods]
        assert set(methods) == {
            method
            for method in PERMISSIONS
            if not method.startswith(("/dase.inference.", f"/{REFLECTION_V1}/"))  # which are not listed
        }
        for method in methods:
            broken = channel.stream_stream(method)()
            await broken.write(b"\xff" * 40)  # refused before anything is done
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await promptly(broken.read())
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT, method
    assert errors_in(caplog) == []


@pytest.mark.parametrize(
    "method",
    [
        "dase.v1.PolicyService/Subscribe",
        "grpc.health.v1.Health/Watch",
        "grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_a_request_that_its_stream_would_keep_is_short(replay, method):
    async with open_channel(replay.address) as channel:
        call = channel.stream_stream(f"/{method}")()
        await call.write(health_pb2.HealthCheckRequest(service="x" * 20_000).SerializeToString())
        with pytest.raises(grpc.aio.AioRpcError, match="at most 16384 bytes, not 20004") as caught:
            await promptly(call.read())
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_reflection_answers_under_its_newer_name_too(replay):
    async with open_channel(replay.address) as channel:
        call = channel.stream_stream(
            "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo",
            request_serializer=reflection_pb2.ServerReflectionRequest.SerializeToString,
            response_deserializer=reflection_pb2.ServerReflectionResponse.FromString,
        )()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await promptly(call.read())).list_services_response.service}
        assert set(SERVICES) < listed
        call.cancel()


async def test_reflection_lists_the_services_and_describes_their_messages(replay):
    async with open_channel(replay.address) as channel:
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        listed = {service.name for service in (await call.read()).list_services_response.service}
        assert listed == {
            "dase.v1.ReplayService",
            "dase.v1.ClusterService",
            "dase.v1.PolicyService",
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }
        for symbol in ("dase.v1.ReplayService", "dase.v1.ClusterService", "dase.v1.InsertChunk"):
            await call.write(reflection_pb2.ServerReflectionRequest(file_containing_symbol=symbol))
            answer = await call.read()
            assert answer.file_descriptor_response.file_descriptor_proto
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF
