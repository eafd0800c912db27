"""0.7.0's trainer client on a machine without a GPU: `python peer_trainer.py`, then lines.

It registers host memory once `torch.cuda.set_device` does nothing. IN_PLACE it serves bfloat16 only.
"""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
from peer_lines import choose_ports, serve
from peer_weights import weights

import modelexpress_rl as mx

torch.cuda.set_device = lambda device: None


class Trainer:
    """One rank; with a world of two, each rank holds half of the rows of every matrix."""

    def __init__(self) -> None:
        self.client: Any = None
        self.held: dict[str, Any] = {}

    def start(
        self,
        address: str,
        model: str,
        rank: int = 0,
        world: int = 1,
        store: str = "",
        ttl_s: int = 30,
        digests: bool = False,
    ) -> dict[str, str]:
        """Join a process group, register, bind the tensors; answers who and where it is."""
        os.environ["MX_RESHARD_PUBLISH_DIGEST"] = str(int(digests))
        if dist.is_initialized():
            dist.destroy_process_group()
        rendezvous = dist.FileStore(store, world) if store else dist.HashStore()
        dist.init_process_group("gloo", rank=rank, world_size=world, store=rendezvous)
        choose_ports()
        self.held = weights(0)
        if world > 1:
            from torch.distributed.device_mesh import init_device_mesh
            from torch.distributed.tensor import Shard, distribute_tensor

            mesh = init_device_mesh("cpu", (world,))
            self.held = {
                name: distribute_tensor(tensor, mesh, [Shard(0)]) if tensor.dim() > 1 else tensor
                for name, tensor in self.held.items()
            }
        self.client = mx.ModelExpressTrainerClient.initialize(
            mx.ModelExpressTrainerConfig(
                device_id=0,
                model_name=model,
                server_url=address,
                staging_mode=mx.TrainerStagingMode.IN_PLACE,
                payload_format=mx.WeightPayloadFormat.FULL_TENSOR,
                registration_ttl_seconds=ttl_s,
                rpc_timeout_seconds=10.0,
                engine_context=mx.FSDPTrainerContext(),
            )
        )
        return {
            "slot": self.client.bind_tensors(self.held),
            "worker_id": self.client.worker_id,
            "endpoint": self.client.worker_endpoint,
        }

    def publish(self, version: str, step: int) -> None:
        """Write the step's weights in place, as an optimizer does, and publish them."""
        for name, tensor in weights(step).items():
            held = self.held[name]
            if hasattr(held, "to_local"):
                rows = held.to_local().shape[0]
                first = rows * dist.get_rank()
                held.to_local().copy_(tensor[first : first + rows])
            else:
                held.copy_(tensor)
        self.client.publish_version(version=mx.WeightVersionRef(version))

    def release(self, version: str) -> None:
        self.client.release_version(version=mx.WeightVersionRef(version))

    def close(self) -> None:
        self.client.close()


if __name__ == "__main__":
    trainer = Trainer()
    serve({name: getattr(trainer, name) for name in ("start", "publish", "release", "close")})
