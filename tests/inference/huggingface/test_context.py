"""What a Hugging Face context refuses; needs no `transformers`."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.engines.huggingface import HuggingFaceGeneratorContext
from tests.inference.capture.support import numbered, published


class Model(torch.nn.Linear):
    config: Any = None
    base_model_prefix = "model"


def test_another_module_is_refused() -> None:
    with pytest.raises(UsageError, match="got a Linear"):
        HuggingFaceGeneratorContext(torch.nn.Linear(2, 2))


def test_a_quantized_model_is_refused() -> None:
    model = Model(2, 2)
    model.hf_quantizer = object()  # type: ignore[assignment]
    with pytest.raises(UsageError, match="Model is quantized"):
        HuggingFaceGeneratorContext(model)


def test_a_transformers_without_rules_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers.conversion_mapping", None)
    adapter = HuggingFaceGeneratorContext(Model(2, 2)).create_adapter()
    with pytest.raises(UsageError, match=r"transformers 5 or newer.*TorchGeneratorContext\(model\)"):
        adapter.loader(published(numbered(weight=(2, 2), bias=(2,))))
