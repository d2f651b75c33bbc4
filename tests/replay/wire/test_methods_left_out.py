"""The guard before every servicer: what a servicer leaves out is refused without a traceback."""

import grpc
import pytest
from logged import errors_in
from replay.wire.services import listening, promptly

from dase_grpc.replay.client.cluster import open_channel
from dase_grpc.replay.wire.v1 import cluster_pb2_grpc, policy_pb2_grpc, replay_pb2_grpc


async def answer_to_nothing(call):
    """What comes after an empty message, or instead of it where the refusal is there before."""
    await call.write(b"")
    return await call.read()


@pytest.mark.parametrize(
    "method",
    ["ReplayService/Describe", "ReplayService/Insert", "PolicyService/Publish", "PolicyService/Subscribe"],
    ids=["unary_unary", "stream_stream", "stream_unary", "unary_stream"],
)
async def test_a_method_that_its_servicer_leaves_out_is_unimplemented_without_a_traceback(method, caplog):
    bare = (
        replay_pb2_grpc.ReplayServiceServicer(),
        cluster_pb2_grpc.ClusterServiceServicer(),
        policy_pb2_grpc.PolicyServiceServicer(),
    )
    async with listening(*bare) as (_, address), open_channel(address) as channel:
        call = channel.stream_stream(f"/dase.v1.{method}")()
        with pytest.raises(grpc.aio.AioRpcError, match=f"does not implement /dase.v1.{method}") as caught:
            await promptly(answer_to_nothing(call))
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert errors_in(caplog) == []
