"""0.7.0's generator client over a stand-in for vLLM: `python peer_generator.py`."""

from __future__ import annotations

import base64
import ctypes
import hashlib
import os
from dataclasses import asdict
from typing import Any

import peer_vllm
from peer_lines import choose_ports, serve

peer_vllm.stand_in()

import grpc  # noqa: E402
import torch  # noqa: E402
from modelexpress.nixl_transfer import NixlTransferManager  # noqa: E402
from modelexpress.refit.reshard import rendezvous  # noqa: E402
from peer_weights import as_bytes, weights  # noqa: E402

import modelexpress_rl as mx  # noqa: E402
from modelexpress_rl import refit_pb2_grpc  # noqa: E402
from modelexpress_rl.inference.source.trainer import TrainerSourceResolver  # noqa: E402


class Generator:
    """One rank."""

    def __init__(self) -> None:
        self.address = ""
        self.client: Any = None
        self.staged: Any = None
        self.engine: Any = None

    def start(self, address: str, model: str, **config: Any) -> str:
        """Register, with a new engine; answers the worker id."""
        choose_ports()
        self.address = address
        self.engine = peer_vllm.Engine(*weights(0)["gate.weight"].shape)
        if "source_order" in config:
            config["source_order"] = tuple(map(mx.WeightSource, config["source_order"]))
        self.client = mx.ModelExpressGeneratorClient.initialize(
            mx.ModelExpressGeneratorConfig(
                engine_context=mx.VllmGeneratorContext(self.engine, peer_vllm.VllmConfig()),
                model_name=model,
                server_url=address,
                rpc_timeout_seconds=10.0,
                **config,
            )
        )
        return self.client.worker_id

    def stage(self, version: str) -> dict[str, float]:
        """Transfer and verify; answers the metrics."""
        self.staged = self.client.stage_weight(version=mx.WeightVersionRef(version))
        return dict(self.staged.metrics)

    def apply(self) -> bool:
        """Install what is staged."""
        self.client.apply_weight(self.staged)
        return bool(self.staged.applied)

    def release(self) -> None:
        self.staged.release()

    def close(self) -> None:
        self.client.close()

    def holds(self) -> dict[str, str]:
        """The sha256 of every parameter."""
        return {
            name: hashlib.sha256(as_bytes(parameter)).hexdigest()
            for name, parameter in self.engine.named_parameters()
        }

    def parse(self, manifest: str) -> dict[str, Any]:
        """A manifest (base64) as 0.7.0 reads it, its plan's inputs, and 0.7.0's writing of the same."""
        data = base64.b64decode(manifest)
        read = rendezvous.unwrap_rendezvous_blob(data)
        rendezvous.build_sources(rendezvous.merge_shard_tables([read.tensors]))
        again = rendezvous.wrap_rendezvous_blob(
            read.agent_metadata, read.agent_name, read.metadata_endpoint, read.tensors
        )
        return {
            "agent_name": read.agent_name,
            "metadata_endpoint": read.metadata_endpoint,
            "agent_metadata": base64.b64encode(read.agent_metadata).decode(),
            "tensors": [asdict(tensor) for tensor in read.tensors],
            "structural_digest": rendezvous.structural_manifest_digest(data),
            "again": base64.b64encode(again).decode(),
        }

    def resolve(self, version: str) -> list[list[dict[str, Any]]]:
        """The sources of a version as 0.7.0's resolver finds and checks them."""
        with grpc.insecure_channel(self.address) as channel:
            stub = refit_pb2_grpc.RefitServiceStub(channel)
            control = mx.ModelExpressControlClient.connect(server_url=self.address)
            record = control.get_weight_version(version)
            control.close()
            resolver = TrainerSourceResolver(service=lambda: stub, rpc_timeout_seconds=10.0)
            return [
                [
                    {
                        "slot": source.source_slot_id,
                        "worker_id": source.worker_id,
                        "manifest_digest": source.manifest_digest,
                        "endpoint": source.transport.manifest_endpoint,
                    }
                    for source in candidate.inputs.sources
                ]
                for candidate in resolver.candidates(record)
            ]

    def read_by_endpoint(self, agent: str, endpoint: str, addr: int, size: int) -> str:
        """Dial an agent's metadata listener and read its memory; answers the bytes' sha256."""
        choose_ports()
        # It hears the answer only where it listens itself.
        manager = NixlTransferManager(
            "reader-by-endpoint", 0, listen_port=int(os.environ["MX_METADATA_PORT"])
        )
        manager.initialize()
        try:
            host, _, port = endpoint.rpartition(":")
            manager.fetch_remote_and_wait(agent, host, int(port), timeout_seconds=20.0)
            buffer = torch.zeros(size, dtype=torch.uint8)
            manager.register_dram_buffer(buffer)
            manager.receive_dram_into_buffer(agent, addr, buffer, size, timeout_seconds=20.0)
            return hashlib.sha256(ctypes.string_at(buffer.data_ptr(), size)).hexdigest()
        finally:
            manager.shutdown()


if __name__ == "__main__":
    generator = Generator()
    names = ("start", "stage", "apply", "release", "close", "holds", "parse", "resolve", "read_by_endpoint")
    serve({name: getattr(generator, name) for name in names})
