"""Under which names vLLM finds our weight transfer engine."""

from __future__ import annotations

from pathlib import Path

import pytest
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from modelexpress_rl.inference.engines.vllm.plugin import register
from modelexpress_rl.inference.engines.vllm.weight_transfer_engine import ModelExpressWeightTransferEngine


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    """vLLM's registry as vLLM made it, or as an earlier `register` left it."""
    found = dict(WeightTransferEngineFactory._registry)
    monkeypatch.setattr(WeightTransferEngineFactory, "_registry", found)
    return found


def test_both_names_are_ours(registry: dict[str, object]) -> None:
    register()
    register()  # vLLM may call it repeatedly
    for name in ("modelexpress-rl", "modelexpress"):
        assert registry[name]() is ModelExpressWeightTransferEngine  # type: ignore[operator]


def test_nvidias_package_keeps_its_name(
    registry: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "modelexpress").mkdir()
    (tmp_path / "modelexpress" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    before = registry["modelexpress"]
    register()
    assert registry["modelexpress"] is before
    assert registry["modelexpress-rl"]() is ModelExpressWeightTransferEngine  # type: ignore[operator]
