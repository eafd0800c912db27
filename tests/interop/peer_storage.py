"""0.7.0's canonical versions in object storage, both ends: `python peer_storage.py`, then lines.

Its own publication and its own reconstruction; the control plane's records, which both ask for, are given.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

os.environ |= {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}

import torch
import torch.distributed as dist
from peer_lines import serve
from safetensors.torch import load_file

import modelexpress_rl as mx
from modelexpress_rl import refit_pb2
from modelexpress_rl.inference.methods.canonical_delta import CanonicalDeltaUpdateMethod
from modelexpress_rl.inference.source.object_storage import ObjectStorageSourceResolver
from modelexpress_rl.s3 import S3Client
from modelexpress_rl.train.methods.canonical_delta import CanonicalDeltaPublicationMethod
from modelexpress_rl.utils import make_tensor_reader


def record(version: dict[str, Any]) -> Any:
    """A version's record as its control client hands it out."""
    return mx.WeightVersion(
        version_id=version["version_id"],
        model_name="m",
        payload_format=mx.WeightPayloadFormat(version["payload_format"]),
        base_version_id=version["base_version_id"],
        object_storage=mx.ObjectStorageSource(mx.ObjectStorageType.S3, version["uri"]),
        expected_source_slots=(),
        layout_signature="",
        state=mx.WeightVersionState.READY,
        created_at_unix_ms=0,
    )


def reconstruct(endpoint: str, seed: str, folder: str, chain: list[dict[str, Any]]) -> dict[str, str]:
    """The sha256 of every tensor of the last version of a chain that begins at the seed or a full one."""
    config = mx.ObjectStorageGeneratorConfig(
        storage_type=mx.ObjectStorageType.S3,
        initial_base_version_id="v0",
        seed_checkpoint_path=seed,
        refit_checkpoint_dir=folder,
        endpoint_url=endpoint,
        region_name="us-east-1",
    )
    method = CanonicalDeltaUpdateMethod(model_name="m", config=config)
    try:
        resolver = ObjectStorageSourceResolver()
        pairs = [(each, next(iter(resolver.candidates(each)))) for each in map(record, chain)]
        prepared = method.prepare_chain(tuple(pairs))
        return held(prepared.checkpoint.path)
    finally:
        method.close()


def held(path: Path) -> dict[str, str]:
    """The sha256 of every tensor of a checkpoint's files, as the safetensors package reads them."""
    found = {}
    for file in sorted(path.glob("*.safetensors")):
        for name, tensor in load_file(file).items():
            found[name] = hashlib.sha256(as_bytes(tensor)).hexdigest()
    return found


def publish(endpoint: str, seed: str, checkpoints: list[str], chain: list[dict[str, Any]]) -> dict[str, Any]:
    """Publish the tensors of one checkpoint after the other as the versions of a chain, from one rank."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    versions = {each["version_id"]: refit_pb2.WeightVersion(**wire(each)) for each in chain}

    class Service:
        def GetWeightVersion(self, request: Any, **_: Any) -> Any:  # noqa: N802 (the RPC's name)
            return refit_pb2.GetWeightVersionResponse(version=versions[request.uid])

    method = CanonicalDeltaPublicationMethod(
        config=mx.ObjectStorageConfig(
            storage_type=mx.ObjectStorageType.S3,
            uri_prefix="s3://bucket/run",
            initial_base_version_id="v0",
            seed_checkpoint_path=seed,
            endpoint_url=endpoint,
            region_name="us-east-1",
        ),
        model_name="m",
        service=Service,
        rpc_timeout_seconds=10.0,
        process_group=dist.group.WORLD,
        read_seed_tensor=make_tensor_reader(seed)[0],
        s3=S3Client(endpoint_url=endpoint, region_name="us-east-1"),
    )
    try:
        method.prepare_base(hf_tensor_iter=buckets(seed))
        for checkpoint, each in zip(checkpoints, chain, strict=True):
            version = mx.WeightVersionRef(each["version_id"])
            staged = method.stage(version=version, hf_tensor_iter=buckets(checkpoint))
            method.publish(version=version, staged=staged)
        return dict(method.pop_metrics())
    finally:
        method.close()


def buckets(checkpoint: str) -> list[list[tuple[str, torch.Tensor]]]:
    """Every tensor of a checkpoint, in buckets of one."""
    tensors = {}
    for file in sorted(Path(checkpoint).glob("*.safetensors")):
        tensors |= load_file(file)
    return [[item] for item in tensors.items()]


def wire(version: dict[str, Any]) -> dict[str, Any]:
    """A version's record as the control plane sends it."""
    kind = f"WEIGHT_PAYLOAD_FORMAT_{version['payload_format']}"
    return {
        "uid": version["version_id"],
        "model_name": "m",
        "payload_format": refit_pb2.WeightPayloadFormat.Value(kind),
        "base_version_id": version["base_version_id"],
        "object_storage": refit_pb2.ObjectStorageSource(
            uri=version["uri"], storage_type=refit_pb2.ObjectStorageType.Value("OBJECT_STORAGE_TYPE_S3")
        ),
    }


def as_bytes(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()


if __name__ == "__main__":
    serve({"reconstruct": reconstruct, "publish": publish})
