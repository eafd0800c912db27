"""Under which names vLLM finds our weight transfer engine."""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from modelexpress_rl.inference.engines.vllm.plugin import register
from modelexpress_rl.inference.engines.vllm.weight_transfer_engine import ModelExpressWeightTransferEngine

MODULE_OF_VLLM = "vllm.distributed.weight_transfer.modelexpress_engine"


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """vLLM's registry as vLLM makes it, without what it registers of its own but for `modelexpress`."""
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", {})
    WeightTransferEngineFactory.register_engine(
        "modelexpress", MODULE_OF_VLLM, "ModelExpressWeightTransferEngine"
    )
    monkeypatch.delitem(sys.modules, MODULE_OF_VLLM, raising=False)
    return WeightTransferEngineFactory._registry


def test_vllm_finds_the_plugin() -> None:
    found = entry_points(group="vllm.general_plugins", name="modelexpress_rl")
    assert {each.load() for each in found} == {register}


def test_both_names_are_ours(registry: dict[str, object]) -> None:
    register()
    register()  # vLLM may call it repeatedly
    for name in ("modelexpress-rl", "modelexpress"):
        assert registry[name]() is ModelExpressWeightTransferEngine  # type: ignore[operator]
    assert "modelexpress" not in sys.modules


def test_nvidias_package_keeps_its_name(
    registry: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM's own module then imports its helper from that package, and the engine from ours."""
    (tmp_path / "modelexpress").mkdir()
    (tmp_path / "modelexpress" / "__init__.py").write_text(
        "def configure_vllm_logging(): called.append(1)\ncalled = []\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = registry["modelexpress"]
    try:
        register()
        assert registry["modelexpress"] is before
        assert registry["modelexpress-rl"]() is ModelExpressWeightTransferEngine  # type: ignore[operator]
        assert before() is ModelExpressWeightTransferEngine  # type: ignore[operator]
        assert sys.modules["modelexpress"].called == [1]
    finally:
        sys.modules.pop("modelexpress", None)
        sys.modules.pop(MODULE_OF_VLLM, None)
