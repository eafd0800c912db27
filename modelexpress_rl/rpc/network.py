"""What connects this process with others, as one value: gRPC, or what a simulation brings instead."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from modelexpress_rl.rpc.clients import ControlPlane, WorkerEndpoint
from modelexpress_rl.rpc.endpoint import EndpointServer


@dataclass(frozen=True, slots=True)
class Network:
    """The classes of clients and of the endpoint, each called as the real one is."""

    control_plane: Callable[..., ControlPlane] = ControlPlane
    worker_endpoint: Callable[..., WorkerEndpoint] = WorkerEndpoint
    endpoint_server: Callable[..., EndpointServer] = EndpointServer


GRPC = Network()
