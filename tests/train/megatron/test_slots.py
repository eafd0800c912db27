"""The source slot names the partition: layout in, neither bytes nor order."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import pytest

from modelexpress_rl.train.engines.megatron import MegatronTensorSpec, megatron_source_slot_id
from tests.train.megatron.support import numbered, sharded

SPECS = (
    sharded(
        "b.qkv", "qkv_column", numbered(12, 2), ("q", "k", "v"), 0, 2, 1, {"head_dim": 1, "num_heads": 4}
    ),
    MegatronTensorSpec("a.norm", numbered(2), "replicated", ("norm",), (2,)),
)
# Written out by hand: what the contract says is hashed.
TEXT = (
    '[{"extras":{},"global_shape":[2],"hf_names":["norm"],"local_shard_range":null,"name":"a.norm",'
    '"placement_kind":"REPLICATE","role":"replicated","shard_axis":null},'
    '{"extras":{"head_dim":1,"num_heads":4},"global_shape":[12,2],"hf_names":["q","k","v"],'
    '"local_shard_range":[6,12],"name":"b.qkv","placement_kind":"SHARD","role":"qkv_column","shard_axis":0}]'
)


def test_the_hashed_text() -> None:
    assert megatron_source_slot_id(SPECS) == "megatron:partition:" + hashlib.sha256(TEXT.encode()).hexdigest()


def test_a_literal() -> None:
    assert (
        megatron_source_slot_id(SPECS)
        == "megatron:partition:1e6b0b5611cce4130eb5f4bda2d0454b0285a6541a9630f761dacacb75b3bc32"
    )


def test_replicas_share_it_whatever_their_bytes_and_order() -> None:
    replica = [
        dataclasses.replace(s, tensor=s.tensor + 1, hf_names=list(s.hf_names)) for s in reversed(SPECS)
    ]
    assert megatron_source_slot_id(replica) == megatron_source_slot_id(SPECS)


@pytest.mark.parametrize(
    "change",
    [
        {"name": "c"},
        {"role": "column"},
        {"hf_names": ("q", "k", "w")},
        {"global_shape": (24, 2)},
        {"placement_kind": "REPLICATE"},
        {"shard_axis": 1},
        {"local_shard_range": (0, 6)},
        {"extras": {"head_dim": 2}},
    ],
)
def test_every_fact_of_the_layout_counts(change: dict[str, Any]) -> None:
    changed = (dataclasses.replace(SPECS[0], **change), SPECS[1])
    assert megatron_source_slot_id(changed) != megatron_source_slot_id(SPECS)
