"""One real rank: `python -m tests.train.fsdp.real_rank JOB FOLDER [ADDRESS]`, with RANK and WORLD_SIZE.

`refit` trains with two ranks and publishes after every step, case after case; rank 0 writes what the
full state dict is into FOLDER before it. `mesh` trains on 2-D meshes of four ranks and writes what each
rank would publish. `peer` publishes what the tests with 0.7.0 load.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from modelexpress_rl import (
    FSDPTrainerContext,
    ModelExpressControlClient,
    ModelExpressTrainerClient,
    ModelExpressTrainerConfig,
    WeightPayloadFormat,
    WeightVersionRef,
)
from tests.interop import peer_weights
from tests.train.fsdp.cases import COPY_MODES, SEED, STEPS, Model, cast, optimizer_of, to_hugging_face, train
from tests.train.fsdp.support import parts_of_boxes

WAIT_S = 30.0


def gathered(tensors: dict[str, Any]) -> dict[str, Tensor]:
    """The full tensors, as torch itself puts them together."""
    full = {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in tensors.items()}
    return {name: tensor.detach().clone() for name, tensor in full.items()}


def sharded_model(mesh: DeviceMesh, wrap: Callable[[nn.Module], Any] = lambda module: module) -> Model:
    torch.manual_seed(SEED)
    model = Model()
    for block in model.blocks:
        wrap(block)
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


class Publisher:
    """A client of this rank, and what it does for each version."""

    def __init__(
        self, case: str, address: str, folder: Path, mode: str, context: FSDPTrainerContext, **more: Any
    ) -> None:
        self.case, self.folder = case, folder
        config = ModelExpressTrainerConfig(
            device_id=0,
            model_name=case,
            server_url=address,
            staging_mode=mode,
            engine_context=context,
            rpc_timeout_seconds=WAIT_S,
            **more,
        )
        self.client = ModelExpressTrainerClient.initialize(config)
        self.control = ModelExpressControlClient.connect(address)

    def publish(self, step: int, full: dict[str, Tensor], tensors: Any = None) -> Any:
        """Write the reference, have the version created, and publish this rank's part of it."""
        version = f"{self.case}-{step}"
        staged = self.client.stage_shard(WeightVersionRef(version), tensors=tensors)
        self._create(version, full, staged.source_slot_id)
        staged.publish()
        return staged

    def publish_and_go_on(self, step: int, full: dict[str, Tensor], tensors: Any) -> Any:
        """The same, but the copy and the announcement go on by themselves."""
        version = f"{self.case}-{step}"
        self._create(version, full, f"publisher:global-rank:{dist.get_rank()}")
        return self.client.publish_version(version, tensors)

    def _create(self, version: str, full: dict[str, Tensor], slot: str) -> None:
        slots: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(slots, slot)
        if dist.get_rank() == 0:
            torch.save(full, self.folder / f"{version}.pt")
            self.control.create_weight_version(
                model_name=self.case,
                idempotency_key=version,
                payload_format=WeightPayloadFormat.FULL_TENSOR,
                expected_source_slots=slots,
                uid=version,
            )
        dist.barrier()

    def close(self) -> None:
        self.client.close()
        self.control.close()


def in_place(address: str, folder: Path) -> None:
    """float32 as it is, the state dict bound once; the optimizer waits for the readers."""
    model = sharded_model(init_device_mesh("cpu", (2,)))
    optimizer = optimizer_of(model)
    publisher = Publisher("in-place", address, folder, "IN_PLACE", FSDPTrainerContext(wire_dtype=None))
    assert publisher.client.bind_tensors(model.state_dict()) == f"publisher:global-rank:{dist.get_rank()}"
    for step in range(STEPS):
        train(model, optimizer, step)
        publisher.publish(step, gathered(model.state_dict())).source_reuse_ready.wait(WAIT_S)
    publisher.close()


def copied(address: str, folder: Path, mode: str) -> None:
    """Cast and converted while it is copied, from a state dict of each step; training goes on at once."""
    traced: list[int] = []

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        traced.append(len(tensors))
        return to_hugging_face(tensors)

    model = sharded_model(init_device_mesh("cpu", (2,)))
    optimizer = optimizer_of(model)
    norms = {name: torch.float32 for name in model.state_dict() if "norm" in name}
    context = FSDPTrainerContext(wire_dtype_overrides=norms, convert_native_to_hf=convert)
    publisher = Publisher(f"copied-{mode}", address, folder, mode, context)
    staged = []
    for step in range(STEPS):
        train(model, optimizer, step)
        full = cast(to_hugging_face(gathered(model.state_dict())), keep="norm")
        staged.append(publisher.publish(step, full, tensors=model.state_dict()))
    for one in staged:
        one.source_reuse_ready.wait(WAIT_S)
    assert len(traced) == 1
    publisher.close()


def overlapped(address: str, folder: Path) -> None:
    """The copy is made beside the next forward and backward pass; the optimizer waits for its end."""
    model = sharded_model(init_device_mesh("cpu", (2,)))
    optimizer = optimizer_of(model)
    publisher = Publisher(
        "overlapped", address, folder, "COPY_TO_DEVICE", FSDPTrainerContext(), overlap="CAPTURE"
    )
    staged: list[Any] = []
    for step in range(STEPS):
        train(model, optimizer, step, lambda: [one.weights_free.wait(WAIT_S) for one in staged])
        full = cast(gathered(model.state_dict()), keep="nothing")
        staged.append(publisher.publish_and_go_on(step, full, model.state_dict()))
    for one in staged:
        one.source_reuse_ready.wait(WAIT_S)
        assert one.published.done
    publisher.close()


def nothing(address: str, folder: Path) -> None:
    """One row: the second rank has none of it, and its slot is expected all the same."""
    mesh = init_device_mesh("cpu", (2,))
    for mode in ("IN_PLACE", *COPY_MODES):
        tensor = distribute_tensor(torch.zeros(1, 6), mesh, [Shard(0)])
        context = FSDPTrainerContext(wire_dtype=None, tensors={"only": tensor})
        publisher = Publisher(f"nothing-{mode}", address, folder, mode, context)
        for step in range(2):
            tensor.to_local().add_(1)
            publisher.publish(step, gathered({"only": tensor})).source_reuse_ready.wait(WAIT_S)
        publisher.close()


def for_a_peer(address: str, folder: Path) -> None:
    """What a generator of 0.7.0 loads: sharded over both ranks, then with a rank that holds nothing."""
    mesh = init_device_mesh("cpu", (2,))
    first = DeviceMesh("cpu", [0])
    placements = {"down.weight": [Shard(1)], "norm.weight": [Replicate()]}
    for case in ("peer-sharded", "peer-nothing"):
        tensors: dict[str, Any] = {
            name: distribute_tensor(tensor, mesh, placements.get(name, [Shard(0)]))
            if case == "peer-sharded"
            else distribute_tensor(tensor, first, [Shard(0)], src_data_rank=None)
            for name, tensor in peer_weights.weights(0).items()
        }
        publisher = Publisher(case, address, folder, "IN_PLACE", FSDPTrainerContext(tensors=tensors))
        for step in range(2):
            for name, full in peer_weights.weights(step).items():
                held = tensors[name]
                if held.to_local().numel():
                    made = distribute_tensor(full, held.device_mesh, held.placements, src_data_rank=None)
                    held.to_local().copy_(made.to_local())
            publisher.publish(step, {}).source_reuse_ready.wait(WAIT_S)
        publisher.close()


def tensor_parallel(mesh: DeviceMesh) -> Model:
    """FSDP over tensor parallel: the rows of some are cut twice."""

    def wrap(block: nn.Module) -> None:
        plan: Any = {
            "qkv": ColwiseParallel(output_layouts=Replicate()),
            "out": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(block, mesh["tp"], plan)

    return sharded_model(mesh["dp"], wrap)


def mesh_of_four(folder: Path) -> None:
    """Two ways to use a 2-D mesh; what this rank would publish after every step, and the reference."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    models = {"tp": tensor_parallel(mesh), "hsdp": sharded_model(replicated)}
    dumps: dict[str, Any] = {}
    for case, model in models.items():
        optimizer = optimizer_of(model)
        adapter = FSDPTrainerContext(wire_dtype=None, convert_native_to_hf=to_hugging_face).create_adapter()
        slot = adapter.bind_tensors(model)
        steps = []
        for step in range(2):
            train(model, optimizer, step)
            parts = parts_of_boxes(adapter.boxes())
            steps.append((parts, to_hugging_face(gathered(model.state_dict()))))
        placements = {n: str(t.placements) for n, t in model.named_parameters() if isinstance(t, DTensor)}
        dumps[case] = {"slot": slot, "steps": steps, "placements": placements}
    torch.save(dumps, folder / f"rank{dist.get_rank()}.pt")


def main(job: str, folder: Path, address: str = "") -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder / 'rendezvous'}", rank=rank, world_size=world_size
    )
    if job == "mesh":
        mesh_of_four(folder)
    elif job == "peer":
        for_a_peer(address, folder)
    else:
        in_place(address, folder)
        for mode in COPY_MODES:
            copied(address, folder, mode)
        overlapped(address, folder)
        nothing(address, folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
