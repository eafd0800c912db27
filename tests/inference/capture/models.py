"""Re-enactments of the loaders of inference engines: each rank takes its shards into fused parameters.

Parameters carry a `weight_loader`: a bound method of their layer, a partial, or a closure over the live
parameter. A model's `load_weights` maps published names to parameters, and says which it loaded.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.inference.capture.support import Weights, parameter


@dataclass(frozen=True)
class Parallel:
    """Which tensor-parallel rank of how many; experts are spread over `expert_size` ranks."""

    rank: int = 0
    size: int = 1
    expert_rank: int = 0
    expert_size: int = 1


@dataclass(frozen=True)
class Shape:
    vocabulary: int = 22
    hidden: int = 16
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 4
    inner: int = 24
    experts: int = 4
    layers: int = 2


class LoadedParameter(nn.Parameter):
    """A parameter that knows how it is loaded, as engines have them."""

    output_dim: int
    loader: Callable[..., None]

    def load_shard(self, shard: torch.Tensor, begin: int) -> None:
        data = self.data.narrow(self.output_dim, begin, shard.shape[self.output_dim])
        assert data.shape == shard.shape
        data.copy_(shard)


class Column(nn.Module):
    """Rows of several tensors, this rank's of each, in one parameter."""

    def __init__(self, inputs: int, outputs: list[int], parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        self.own = [rows // parallel.size for rows in outputs]
        self.weight = LoadedParameter(torch.full((sum(self.own), inputs), -1.0), requires_grad=False)
        self.weight.output_dim = 0
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, param: LoadedParameter, loaded: torch.Tensor, shard: int = 0) -> None:
        rows = self.own[shard]
        mine = loaded.narrow(0, self.parallel.rank * rows, rows)
        param.load_shard(mine, sum(self.own[:shard]))


class QKV(nn.Module):
    """q, k and v of this rank; where there are fewer KV heads than ranks, ranks share one."""

    def __init__(self, shape: Shape, parallel: Parallel) -> None:
        super().__init__()
        kv_heads = max(shape.kv_heads // parallel.size, 1)
        replicas = max(parallel.size // shape.kv_heads, 1)
        q = shape.heads // parallel.size * shape.head_dim
        kv = kv_heads * shape.head_dim
        self.places = {"q": (0, q, parallel.rank), "k": (q, kv, parallel.rank // replicas)}
        self.places["v"] = (q + kv, kv, parallel.rank // replicas)
        self.weight = parameter(q + 2 * kv, shape.hidden)
        self.weight.weight_loader = functools.partial(self.load, self.weight)  # type: ignore[attr-defined]

    def load(self, param: nn.Parameter, _: nn.Parameter, loaded: torch.Tensor, shard: str) -> None:
        begin, rows, number = self.places[shard]
        param.data[begin : begin + rows] = loaded.chunk(loaded.shape[0] // rows, dim=0)[number]


class Row(nn.Module):
    """This rank's columns; its loader is a closure over the live parameter, and takes keywords only."""

    def __init__(self, inputs: int, outputs: int, parallel: Parallel) -> None:
        super().__init__()
        self.weight = weight = parameter(outputs, inputs // parallel.size)

        def load(*, param: nn.Parameter, loaded: torch.Tensor) -> None:
            assert param is weight
            begin = parallel.rank * weight.shape[1]
            weight.data.copy_(loaded[:, begin : begin + weight.shape[1]])

        self.weight.weight_loader = load  # type: ignore[attr-defined]


class Vocabulary(nn.Module):
    """Rows of the vocabulary, padded with zeros to a multiple of `pad` for all ranks."""

    def __init__(self, shape: Shape, parallel: Parallel, pad: int = 8) -> None:
        super().__init__()
        padded = -(-shape.vocabulary // (pad * parallel.size)) * pad * parallel.size
        rows = padded // parallel.size
        self.first = min(parallel.rank * rows, shape.vocabulary)
        self.last = min(self.first + rows, shape.vocabulary)
        self.weight = parameter(rows, shape.hidden)
        self.weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(self, param: nn.Parameter, loaded: torch.Tensor) -> None:
        mine = loaded.narrow(0, self.first, max(self.last - self.first, 0))
        param[: mine.shape[0]].data.copy_(mine)
        param[mine.shape[0] :].data.fill_(0)


class Experts(nn.Module):
    """w13 and w2 of this rank's experts: gate and up beside each other, cut over the tensor ranks."""

    def __init__(self, shape: Shape, parallel: Parallel) -> None:
        super().__init__()
        self.parallel = parallel
        own = shape.experts // parallel.expert_size
        inner = shape.inner // parallel.size
        self.w13 = parameter(own, 2 * inner, shape.hidden)
        self.w2 = parameter(own, shape.hidden, inner)
        expert_map = torch.full((shape.experts,), -1, dtype=torch.int32)
        first = parallel.expert_rank * own
        expert_map[first : first + own] = torch.arange(own, dtype=torch.int32)
        self.register_buffer("expert_map", expert_map, persistent=False)
        for weight in (self.w13, self.w2):
            weight.weight_loader = self.load  # type: ignore[attr-defined]

    def load(
        self,
        param: nn.Parameter,
        loaded: torch.Tensor,
        *,
        part: str,
        expert: int,
        report: bool = False,
    ) -> bool:
        local = int(self.expert_map[expert].item())
        if local < 0:
            return False
        data = param.data[local]
        if part == "down":
            inner = data.shape[1]
            data.copy_(loaded.narrow(1, self.parallel.rank * inner, inner))
        else:
            inner = data.shape[0] // 2
            half = data.narrow(0, 0 if part == "gate" else inner, inner)
            half.copy_(loaded.narrow(0, self.parallel.rank * inner, inner))
        return report


class Layer(nn.Module):
    def __init__(self, shape: Shape, parallel: Parallel) -> None:
        super().__init__()
        self.qkv_proj = QKV(shape, parallel)
        self.o_proj = Row(shape.heads * shape.head_dim, shape.hidden, parallel)
        self.gate_up_proj = Column(shape.hidden, [shape.inner, shape.inner], parallel)
        self.down_proj = Row(shape.inner, shape.hidden, parallel)
        self.experts = Experts(shape, parallel)
        self.norm = nn.Module()
        self.norm.weight = parameter(shape.hidden, dtype=torch.bfloat16)


class Engine(nn.Module):
    """A model of one rank, with a tied head."""

    STACKED = (
        ("qkv_proj", "q_proj", "q"),
        ("qkv_proj", "k_proj", "k"),
        ("qkv_proj", "v_proj", "v"),
        ("gate_up_proj", "gate_proj", 0),
        ("gate_up_proj", "up_proj", 1),
    )

    def __init__(self, shape: Shape, parallel: Parallel) -> None:
        super().__init__()
        self.embed_tokens = Vocabulary(shape, parallel)
        self.layers = nn.ModuleList(Layer(shape, parallel) for _ in range(shape.layers))
        self.lm_head = nn.Module()
        self.lm_head.weight = self.embed_tokens.weight

    def load_weights(self, weights: Weights) -> set[str]:
        return set(self._loaded(weights))

    def _loaded(self, weights: Weights) -> Iterator[str]:
        params = dict(self.named_parameters())
        for name, loaded in weights:
            if "inv_freq" in name or name == "lm_head.weight":
                continue
            if ".experts." in name:
                layer, _, rest = name.partition(".experts.")
                expert, part, _ = rest.split(".")
                target = f"{layer}.experts.{'w2' if part == 'down' else 'w13'}"
                loader = params[target].weight_loader
                loader(params[target], loaded, part=part, expert=int(expert), report=True)
                yield target
                continue
            for fused, single, shard in self.STACKED:
                if single in name:
                    name = name.replace(single, fused)
                    params[name].weight_loader(params[name], loaded, shard)
                    break
            else:
                self._load_one(params[name], loaded)
            yield name

    def _load_one(self, param: Any, loaded: torch.Tensor) -> None:
        loader = getattr(param, "weight_loader", None)
        if loader is None:
            param.data.copy_(loaded)
        elif isinstance(getattr(loader, "__self__", None), nn.Module):
            loader(param, loaded)
        else:
            loader(param=param, loaded=loaded)


def checkpoint(shape: Shape) -> dict[str, torch.Tensor]:
    """What a trainer publishes for `Engine`: every element of its own value."""
    q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (shape.vocabulary, shape.hidden)}
    shapes["lm_head.weight"] = shapes["embed_tokens.weight"]
    for i in range(shape.layers):
        layer = {
            "q_proj": (q, shape.hidden),
            "k_proj": (kv, shape.hidden),
            "v_proj": (kv, shape.hidden),
            "o_proj": (shape.hidden, q),
            "gate_proj": (shape.inner, shape.hidden),
            "up_proj": (shape.inner, shape.hidden),
            "down_proj": (shape.hidden, shape.inner),
            "norm": (shape.hidden,),
        }
        for expert in range(shape.experts):
            layer[f"experts.{expert}.gate"] = layer[f"experts.{expert}.up"] = layer["gate_proj"]
            layer[f"experts.{expert}.down"] = layer["down_proj"]
        shapes |= {f"layers.{i}.{name}.weight": own for name, own in layer.items()}
        shapes[f"layers.{i}.rotary.inv_freq"] = (shape.head_dim // 2,)
    found, begin = {}, 1
    for name, own in shapes.items():
        count = int(torch.Size(own).numel())
        found[name] = torch.arange(begin, begin + count, dtype=torch.float32).reshape(own)
        begin += count
    return found
