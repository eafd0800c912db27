"""0.7.0's control client and its generated stubs: `python peer_control.py`, then lines."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import grpc
from google.protobuf import json_format
from peer_lines import serve

import modelexpress_rl as mx
from modelexpress_rl import refit_pb2, refit_pb2_grpc

ENUMS = {"payload_format": mx.WeightPayloadFormat, "state": mx.WeightVersionState}


class Control:
    """One connection of each kind to a server, another after each `connect`."""

    def connect(self, address: str) -> None:
        self.client = mx.ModelExpressControlClient.connect(server_url=address, rpc_timeout_seconds=10.0)
        self.channel = grpc.insecure_channel(address)
        self.stub = refit_pb2_grpc.RefitServiceStub(self.channel)

    def control(self, method: str, **arguments: Any) -> dict[str, Any]:
        """Call a method of the control client; answers the version."""
        for name, enum in ENUMS.items():
            if name in arguments:
                arguments[name] = enum(arguments[name])
        if (storage := arguments.get("object_storage")) is not None:
            arguments["object_storage"] = mx.ObjectStorageSource(
                storage_type=mx.ObjectStorageType(storage["storage_type"]), uri=storage["uri"]
            )
        version = getattr(self.client, method)(**arguments)
        return asdict(version)

    def raw(self, rpc: str, request: dict[str, Any], endpoint: str | None = None) -> dict[str, Any]:
        """Call an RPC through the stub; with `endpoint`, of a worker."""
        message = getattr(refit_pb2, f"{rpc}Request")()
        json_format.ParseDict(request, message)
        if endpoint is None:
            answer = getattr(self.stub, rpc)(message, timeout=10.0)
        else:
            with grpc.insecure_channel(endpoint) as channel:
                answer = getattr(refit_pb2_grpc.RefitWorkerServiceStub(channel), rpc)(message, timeout=10.0)
        return json_format.MessageToDict(answer, preserving_proto_field_name=True)

    def health(self, service: str) -> int:
        """The serving status by grpc.health.v1, spoken by hand: 1 is SERVING."""
        check = self.channel.unary_unary("/grpc.health.v1.Health/Check")
        name = service.encode()
        answer: bytes = check(b"\x0a" + bytes([len(name)]) + name, timeout=10.0)
        return answer[1] if answer[:1] == b"\x08" else 0


if __name__ == "__main__":
    control = Control()
    serve({name: getattr(control, name) for name in ("connect", "control", "raw", "health")})
