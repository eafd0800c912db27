"""A stand-in for SGLang's loader and for a model of it, as of sglang 0.5.23.

What it keeps of SGLang: the steps of an update, in `DefaultModelLoader`'s static methods; quantization
methods that pack a layer's parameters after loading, and undo that; a fused projection whose parameter has
a weight loader with shard ids; `load_weights` that ends with what the model derives of its weights.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Iterable
from typing import Any

import pytest
import torch

ROWS, COLUMNS = 8, 6
SHARDS = ("q", "k", "v")


class DefaultModelLoader:
    """The part of SGLang's loader that an update needs."""

    calls: list[str] = []  # noqa: RUF012 (what SGLang was asked, in order)

    @staticmethod
    def load_weights_only(model: Any, weights: Any, target_device: torch.device) -> None:
        DefaultModelLoader.calls.append(f"load on {target_device}")
        model.load_weights(weights)

    @staticmethod
    def postprocess_weights(model: Any, target_device: torch.device) -> None:
        DefaultModelLoader.calls.append("process")
        for layer in model.modules():
            if getattr(layer, "quant_method", None) is not None:
                layer.quant_method.process_weights_after_loading(layer)

    @staticmethod
    def restore_weights_before_loading(model: Any, target_device: torch.device) -> None:
        DefaultModelLoader.calls.append("restore")
        for layer in model.modules():
            if getattr(layer, "quant_method", None) is not None:
                layer.quant_method.restore_weights_before_loading(layer)

    @staticmethod
    def load_weights_and_postprocess(model: Any, weights: Any, target_device: torch.device) -> None:
        DefaultModelLoader.load_weights_only(model, weights, target_device)
        DefaultModelLoader.postprocess_weights(model, target_device)


def install(monkeypatch: pytest.MonkeyPatch, loader: Any = DefaultModelLoader) -> None:
    """Make `sglang.srt.model_loader.loader` importable."""
    DefaultModelLoader.calls.clear()
    for name in ("sglang", "sglang.srt", "sglang.srt.model_loader", "sglang.srt.model_loader.loader"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules["sglang.srt.model_loader.loader"].DefaultModelLoader = loader  # type: ignore[attr-defined]


class Packs:
    """Quantizes a layer to whole numbers with a scale, transposed: another shape and dtype."""

    def process_weights_after_loading(self, layer: Any) -> None:
        weight = layer.weight.data
        scale = weight.abs().max() / 127
        layer.weight = torch.nn.Parameter((weight / scale).round().to(torch.int8).t(), requires_grad=False)
        layer.scale = scale

    def restore_weights_before_loading(self, layer: Any) -> None:
        if layer.weight.dtype is torch.int8:
            layer.weight = Projection.empty(layer.tp_size)
            layer.weight.weight_loader = layer.weight_loader


class Projection(torch.nn.Module):
    """q, k and v fused; each rank has its rows of each."""

    def __init__(self, tp_rank: int, tp_size: int) -> None:
        super().__init__()
        self.tp_rank, self.tp_size = tp_rank, tp_size
        self.quant_method: Any = None
        self.weight = self.empty(tp_size)
        self.weight.weight_loader = self.weight_loader  # type: ignore[attr-defined]

    @staticmethod
    def empty(tp_size: int) -> torch.nn.Parameter:
        return torch.nn.Parameter(torch.full((3 * ROWS // tp_size, COLUMNS), -1.0), requires_grad=False)

    def weight_loader(self, parameter: Any, loaded: torch.Tensor, shard_id: str) -> None:
        rows = ROWS // self.tp_size
        target = parameter.data.narrow(0, SHARDS.index(shard_id) * rows, rows)
        target.copy_(loaded.narrow(0, self.tp_rank * rows, rows))


class Model(torch.nn.Module):
    """One rank's part of a model of one layer and a norm."""

    def __init__(self, tp_rank: int = 0, tp_size: int = 1, quant_config: Any = None) -> None:
        super().__init__()
        self.qkv_proj = Projection(tp_rank, tp_size)
        self.norm = torch.nn.Linear(COLUMNS, 1, bias=False).requires_grad_(False)
        self.quant_config = quant_config
        if quant_config is not None:
            self.qkv_proj.quant_method = quant_config

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        parameters, loaded = dict(self.named_parameters()), set()
        for name, tensor in weights:
            stem, shard = name.removesuffix("_proj.weight"), name[0]
            if stem in SHARDS:
                parameter = parameters["qkv_proj.weight"]
                parameter.weight_loader(parameter, tensor, shard)  # type: ignore[attr-defined]
                loaded.add("qkv_proj.weight")
            else:
                parameters[name].data.copy_(tensor)
                loaded.add(name)
        if hasattr(self, "post_load_weights"):
            self.post_load_weights()
        return loaded


class Derives(Model):
    """Keeps a tensor that it computes of its weights when they are loaded."""

    def __init__(self, tp_rank: int = 0, tp_size: int = 1) -> None:
        super().__init__(tp_rank, tp_size)
        self.absorbed: torch.Tensor | None = None

    def post_load_weights(self) -> None:
        self.absorbed = self.qkv_proj.weight @ self.norm.weight.t()


def tensors(step: int) -> dict[str, torch.Tensor]:
    """A checkpoint: every element differs within a step, and from step to step."""
    shapes = {f"{shard}_proj.weight": (ROWS, COLUMNS) for shard in SHARDS} | {"norm.weight": (1, COLUMNS)}
    found, begin = {}, 1000 * step
    for name, shape in shapes.items():
        count = shape[0] * shape[1]
        found[name] = torch.arange(begin, begin + count, dtype=torch.float32).reshape(shape)
        begin += count
    return found


def loaded(model: Model, step: int) -> Model:
    """The model as SGLang itself loads it."""
    DefaultModelLoader.load_weights_and_postprocess(model, iter(tensors(step).items()), torch.device("cpu"))
    return model


def runner(model: torch.nn.Module, **attributes: Any) -> Any:
    """A model runner that holds a model."""
    return types.SimpleNamespace(model=model, device="cpu", **attributes)
