"""Capture: what a context resolves to, storages that move, what the adapter gives."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch

from modelexpress_rl.errors import StateError, UsageError
from modelexpress_rl.train.engines.megatron import MegatronTensorSpec, MegatronTrainerContext
from modelexpress_rl.train.engines.megatron.adapter import (
    capture,
    resolve_specs,
    verify_unmoved,
)
from modelexpress_rl.train.engines.megatron.megatron_import import import_megatron
from tests.train.megatron.support import numbered, sharded
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


class TestAdapter:
    def test_boxes_are_the_aliases_and_stay_the_same_tuple(self) -> None:
        given = specs()
        adapter = MegatronTrainerContext().create_adapter()
        slot = adapter.bind_tensors(given)
        assert slot == adapter.source_slot_id == capture(given, "").source_slot_id
        boxes = adapter.boxes()
        assert [(box.name, box.offset, box.shape, box.size_bytes) for box in boxes] == [
            ("norm", (0,), (3,), 12),
            ("o", (0, 3), (4, 3), 24),
            ("scale", (), (), 4),
        ]
        assert [box.addr for box in boxes] == [spec.tensor.data_ptr() for spec in given]
        assert adapter.boxes() is boxes

    def test_a_context_with_specs_needs_no_bind(self) -> None:
        given = specs()
        adapter = MegatronTrainerContext(specs=lambda: given).create_adapter()
        assert adapter.source_slot_id == capture(given, "").source_slot_id
        assert len(adapter.boxes()) == 3

    def test_nothing_bound_is_refused(self) -> None:
        with pytest.raises(StateError, match="no tensors are bound"):
            MegatronTrainerContext().create_adapter().boxes()

    def test_a_parameter_that_the_model_replaced_is_named(self) -> None:
        one = model(layer(1))
        adapter = MegatronTrainerContext(
            model=one,
            tensor_parallel_size=2,
            tensor_parallel_rank=1,
            expert_tensor_parallel_size=1,
            expert_tensor_parallel_rank=0,
        ).create_adapter()
        addresses = {box.addr for box in adapter.boxes()}
        name, parameter = next((n, p) for n, p in one.named_parameters() if p.data_ptr() in addresses)
        owner, _, attribute = name.rpartition(".")
        setattr(one.get_submodule(owner), attribute, torch.nn.Parameter(parameter.detach().clone()))
        with pytest.raises(StateError, match="is registered and no longer a parameter of the model"):
            adapter.boxes()


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
