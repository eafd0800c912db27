"""Capture: what a context resolves to, storages that move, copies into an arena."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.train.engines.megatron import MegatronTensorSpec, MegatronTrainerContext
from modelexpress_rl.train.engines.megatron.adapter import (
    ARENA_ALIGNMENT_BYTES,
    capture,
    copy_to_arena,
    plan_arena,
    resolve_specs,
    specs_over_arena,
    verify_unmoved,
)
from modelexpress_rl.train.engines.megatron.megatron_import import import_megatron
from tests.train.megatron.support import assemble, numbered, same_bytes, sharded
from tests.train.megatron.test_from_model import layer, model


def specs() -> tuple[MegatronTensorSpec, ...]:
    return (
        MegatronTensorSpec("norm", torch.nn.Parameter(numbered(3)), "replicated", ("norm",), (3,)),
        sharded("proj", "row", numbered(4, 6, dtype=torch.bfloat16), ("o",), 1, 2, 1),
        MegatronTensorSpec("scale", torch.tensor(2.0), "replicated", ("scale",), ()),
    )


class TestResolve:
    def test_tensors_win_over_the_context(self) -> None:
        given = specs()
        assert resolve_specs(MegatronTrainerContext(specs=given[:1]), given) == given

    def test_specs_of_the_context_may_be_made_late(self) -> None:
        given = specs()
        assert resolve_specs(MegatronTrainerContext(specs=given)) == given
        assert resolve_specs(MegatronTrainerContext(specs=lambda: iter(given))) == given

    @pytest.mark.parametrize("how", ["context", "argument", "list"])
    def test_a_model(self, how: str) -> None:
        one = model(layer(1))
        ranks: dict[str, Any] = {
            "tensor_parallel_size": 2,
            "tensor_parallel_rank": 1,
            "expert_tensor_parallel_size": 1,
            "expert_tensor_parallel_rank": 0,
        }
        context = MegatronTrainerContext(model=one if how == "context" else None, **ranks)
        found = resolve_specs(context, {"context": None, "argument": one, "list": [one]}[how])
        assert len(found) == 4

    @pytest.mark.parametrize(
        ("tensors", "problem"),
        [
            (None, "expected specs or a model, here or in MegatronTrainerContext, got neither"),
            ([], "expected at least one MegatronTensorSpec, got none"),
            ([torch.zeros(1)], r"tensors\[0\]: expected a MegatronTensorSpec or a model, got Tensor"),
        ],
    )
    def test_refusals(self, tensors: Any, problem: str) -> None:
        with pytest.raises(UsageError, match=problem):
            resolve_specs(MegatronTrainerContext(), tensors)


class TestUnmoved:
    def test_training_in_place_moves_nothing(self) -> None:
        captured = capture(specs(), "agent")
        with torch.no_grad():
            captured.specs[0].tensor.add_(1)
        verify_unmoved(captured)

    def test_a_new_storage_is_named(self) -> None:
        captured = capture(specs(), "agent")
        captured.specs[0].tensor.data = numbered(3)
        with pytest.raises(StateError, match=r"^norm: its storage moved since it was registered"):
            verify_unmoved(captured)

    def test_a_freed_storage_is_named(self) -> None:
        captured = capture(specs(), "agent")
        captured.specs[1].tensor.untyped_storage().resize_(0)
        with pytest.raises(StateError, match=r"^proj: its storage moved"):
            verify_unmoved(captured)

    def test_tensors_that_came_or_went_are_named(self) -> None:
        given = specs()
        captured = capture(given[:2], "agent")
        with pytest.raises(StateError, match=r"^proj: is registered and no longer among"):
            verify_unmoved(captured, given[:1])
        with pytest.raises(StateError, match=r"^scale: is among the model's tensors and was not registered"):
            verify_unmoved(captured, given)


class TestArena:
    def test_aliases_over_a_copy_have_the_same_boxes_and_bytes(self) -> None:
        live = specs()
        plan = plan_arena(live)
        assert plan.offsets == (0, 64, 128)
        assert plan.size_bytes == 3 * ARENA_ALIGNMENT_BYTES
        arena = torch.zeros(plan.size_bytes, dtype=torch.uint8)
        staged = specs_over_arena(live, plan, arena)
        assert copy_to_arena(live, staged) == 12 + 24 + 4
        over_live, over_arena = capture(live, "agent"), capture(staged, "agent")
        assert over_arena.source_slot_id == over_live.source_slot_id
        for left, right in zip(over_live.tensors, over_arena.tensors, strict=True):
            assert (left.name, left.full_shape) == (right.name, right.full_shape)
            assert same_bytes(left.shards[0].view, right.shards[0].view)
            assert left.shards[0].shard_offset == right.shards[0].shard_offset
            assert right.shards[0].addr % ARENA_ALIGNMENT_BYTES == arena.data_ptr() % ARENA_ALIGNMENT_BYTES
            assert arena.data_ptr() <= right.shards[0].addr < arena.data_ptr() + plan.size_bytes

    def test_a_later_step_does_not_reach_the_copy(self) -> None:
        full = numbered(4, 2)
        live = (MegatronTensorSpec("w", full.clone(), "column", ("w",), (4, 2)),)
        plan = plan_arena(live)
        staged = specs_over_arena(live, plan, torch.zeros(plan.size_bytes, dtype=torch.uint8))
        copy_to_arena(live, staged)
        live[0].tensor.fill_(0)
        assert same_bytes(assemble([capture(staged, "agent").tensors])["w"], full)

    def test_a_view_that_is_not_contiguous_can_be_copied(self) -> None:
        live = (MegatronTensorSpec("w", numbered(2, 4).t(), "column", ("w",), (4, 2)),)
        with pytest.raises(ValueError, match=r"^w: the view for w is not contiguous"):
            capture(live, "agent")
        plan = plan_arena(live)
        staged = specs_over_arena(live, plan, torch.zeros(plan.size_bytes, dtype=torch.uint8))
        copy_to_arena(live, staged)
        assert same_bytes(assemble([capture(staged, "agent").tensors])["w"], numbered(2, 4).t())

    def test_an_arena_that_is_too_small_is_refused(self) -> None:
        live = specs()
        with pytest.raises(UsageError, match="arena: expected at least 192 bytes, got 100"):
            specs_over_arena(live, plan_arena(live), torch.zeros(100, dtype=torch.uint8))


def test_importing_the_engine_loads_neither_torch_nor_megatron() -> None:
    code = (
        "import sys; import modelexpress_rl.train.engines.megatron; "
        "print(sorted({'torch', 'megatron', 'nixl'} & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_a_missing_megatron_is_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron", None)
    for name in [name for name in sys.modules if name.startswith("megatron.")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(
        UsageError, match=r"megatron-core isn't installed: pip install 'modelexpress-rl\[megatron\]'"
    ):
        import_megatron("megatron.core.parallel_state")
