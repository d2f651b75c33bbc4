"""gRPC's own services on a node's port: health, and reflection under both of its names."""

from collections.abc import Collection
from typing import Any, Final

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection, reflection_pb2

HEALTH: Final = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
REFLECTION_V1: Final = "grpc.reflection.v1.ServerReflection"
"""What newer clients call; its messages are those of v1alpha under another name."""


class NodeHealth(HealthServicer):  # type: ignore[misc]  # the library has no types
    """The health of a node, which is the service "", and of its services once `serving` was called."""

    def __init__(self) -> None:
        super().__init__()
        self._services: tuple[str, ...] = ("",)

    async def serving(self, services: Collection[str]) -> None:
        """Says that the node and each of these services can be used."""
        for service in ("", *services):
            await self.set(service, health_pb2.HealthCheckResponse.SERVING)
        self._services = ("", *services)

    async def List(
        self, request: health_pb2.HealthListRequest, context: Any
    ) -> health_pb2.HealthListResponse:
        """What `Check` says of each, which the library leaves out."""
        checks = {service: health_pb2.HealthCheckRequest(service=service) for service in self._services}
        return health_pb2.HealthListResponse(
            statuses={service: await self.Check(check, context) for service, check in checks.items()}
        )


def add_standard(server: grpc.aio.Server, services: Collection[str]) -> NodeHealth:
    """Has a server serve health and reflection of its services, given by their full names."""
    health = NodeHealth()
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    names = (*services, HEALTH, reflection.SERVICE_NAME)
    reflection.enable_server_reflection(names, server)
    described = grpc.stream_stream_rpc_method_handler(
        reflection.aio.ReflectionServicer(names).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    methods = {"ServerReflectionInfo": described}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(REFLECTION_V1, methods),))
    return health
