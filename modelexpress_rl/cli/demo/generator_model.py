"""A small Llama-like model under Hugging Face names, whole or as one rank's part with fused parameters.

The whole model computes the same logits as the demo's Megatron model does with the same weights. The
parts are laid out as inference engines lay them: qkv_proj and gate_up_proj fused, KV heads repeated
where there are fewer of them than ranks, vocabulary and heads cut by rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from modelexpress_rl.errors import StateError, UsageError

NORM_EPS = 1e-5


@dataclass(frozen=True, slots=True)
class GeneratorShape:
    """The sizes of the whole model, and which part of it a rank holds.

    `fused` gives qkv_proj and gate_up_proj instead of q/k/v and gate/up; a part (`tp_size` over 1) may
    be fused or not. With `tie`, lm_head is embed_tokens.

    Raises:
        UsageError: a size that the ranks can't divide.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    seq: int
    tie: bool = False
    tp_size: int = 1
    tp_rank: int = 0
    fused: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.tp_rank < self.tp_size:
            raise UsageError(f"tp_rank: expected 0 to {self.tp_size - 1}, got {self.tp_rank}")
        if self.hidden % self.heads or self.heads % self.kv_heads:
            raise UsageError(f"heads: {self.hidden=}, {self.heads=} and {self.kv_heads=} must divide in turn")
        for what, extent in (("heads", self.heads), ("ffn", self.ffn), ("vocab", self.vocab)):
            if extent % self.tp_size:
                raise UsageError(f"{what}: {extent} can't be divided among {self.tp_size} ranks")
        if max(self.kv_heads, self.tp_size) % min(self.kv_heads, self.tp_size):
            raise UsageError(f"kv_heads: {self.kv_heads} can't be laid on {self.tp_size} ranks")

    @property
    def head_dim(self) -> int:
        """Rows of one head."""
        return self.hidden // self.heads

    @property
    def local_kv_heads(self) -> int:
        """KV heads of one rank: at least one, then shared with its neighbours."""
        return max(1, self.kv_heads // self.tp_size)

    @property
    def first_kv_head(self) -> int:
        """The first KV head of this rank."""
        return self.tp_rank * self.kv_heads // self.tp_size

    def rows(self, extent: int) -> tuple[int, int]:
        """First row and row count of this rank's even part of `extent` rows."""
        return self.tp_rank * extent // self.tp_size, extent // self.tp_size


@dataclass(frozen=True, slots=True)
class GeneratorSlice:
    """A box of a Hugging Face tensor, and where in which parameter of the rank it goes.

    `hf_offset` and `shape` are in elements of the Hugging Face tensor of shape `hf_shape`;
    `parameter_offset` is in elements of the parameter, whose box has the same `shape`.
    """

    hf_name: str
    hf_shape: tuple[int, ...]
    hf_offset: tuple[int, ...]
    shape: tuple[int, ...]
    parameter: str
    parameter_offset: tuple[int, ...]


def generator_slices(shape: GeneratorShape) -> tuple[GeneratorSlice, ...]:
    """What the rank of `shape` needs: the slices fill every parameter exactly once."""
    return tuple(_slices(shape))


def _slices(shape: GeneratorShape) -> Iterator[GeneratorSlice]:
    yield _rows("model.embed_tokens", shape.vocab, shape.hidden, *shape.rows(shape.vocab))
    yield _rows("model.embed_positions", shape.seq, shape.hidden, 0, shape.seq)
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        yield _vector(prefix + "input_layernorm", shape.hidden)
        yield from _stacked(shape, prefix + "self_attn.", "qkv_proj", _attention_rows(shape))
        yield _columns(prefix + "self_attn.o_proj", shape.hidden, shape.hidden, shape)
        yield _vector(prefix + "post_attention_layernorm", shape.hidden)
        ffn = (shape.ffn, *shape.rows(shape.ffn))
        yield from _stacked(shape, prefix + "mlp.", "gate_up_proj", {"gate_proj": ffn, "up_proj": ffn})
        yield _columns(prefix + "mlp.down_proj", shape.hidden, shape.ffn, shape)
    yield _vector("model.norm", shape.hidden)
    if not shape.tie:
        yield _rows("lm_head", shape.vocab, shape.hidden, *shape.rows(shape.vocab))


def _attention_rows(shape: GeneratorShape) -> dict[str, tuple[int, int, int]]:
    """Rows of the whole q, k and v, and the first row and row count of this rank."""
    head_dim = shape.head_dim
    query = (shape.heads * head_dim, *shape.rows(shape.heads * head_dim))
    kv = (shape.kv_heads * head_dim, shape.first_kv_head * head_dim, shape.local_kv_heads * head_dim)
    return {"q_proj": query, "k_proj": kv, "v_proj": kv}


def _stacked(
    shape: GeneratorShape, prefix: str, fused_name: str, parts: dict[str, tuple[int, int, int]]
) -> Iterator[GeneratorSlice]:
    """Parts that lie one below the other in a fused parameter, or each in its own."""
    row = 0
    for part, (full_rows, first, count) in parts.items():
        target = fused_name if shape.fused else part
        yield _rows(
            prefix + part, full_rows, shape.hidden, first, count, prefix + target, row if shape.fused else 0
        )
        row += count


def _rows(
    hf: str, full_rows: int, width: int, first: int, count: int, parameter: str | None = None, row: int = 0
) -> GeneratorSlice:
    target = f"{parameter or hf}.weight"
    return GeneratorSlice(f"{hf}.weight", (full_rows, width), (first, 0), (count, width), target, (row, 0))


def _columns(hf: str, rows: int, full_width: int, shape: GeneratorShape) -> GeneratorSlice:
    first, count = shape.rows(full_width)
    name = f"{hf}.weight"
    return GeneratorSlice(name, (rows, full_width), (0, first), (rows, count), name, (0, 0))


def _vector(hf: str, width: int) -> GeneratorSlice:
    return GeneratorSlice(f"{hf}.weight", (width,), (0,), (width,), f"{hf}.weight", (0,))


class _Weight(nn.Module):
    """A module with nothing but a `weight`, zero until something is installed."""

    def __init__(self, *shape: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(shape, dtype=dtype), requires_grad=False)


class GeneratorModel(nn.Module):
    """The demo's generator: parameters as `generator_slices` says, and a forward for the whole model.

    Every parameter starts as zeros, so that weights which were never installed are seen.
    """

    def __init__(self, shape: GeneratorShape, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.shape = shape
        for name, extents in _parameter_shapes(shape).items():
            _attach(self, name.removesuffix(".weight"), _Weight(*extents, dtype=dtype))
        if shape.tie:
            tied = nn.Module()
            tied.weight = self.get_parameter("model.embed_tokens.weight")
            self.lm_head = tied

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Logits (batch, sequence, vocab) of (batch, sequence) token ids.

        Raises:
            StateError: the model is one rank's part; a whole one is needed to compute.
        """
        if self.shape.tp_size != 1:
            raise StateError(f"forward needs the whole model, this is one of {self.shape.tp_size} parts")
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        state = self._weight("model.embed_tokens")[tokens] + self._weight("model.embed_positions")[positions]
        for layer in range(self.shape.layers):
            prefix = f"model.layers.{layer}."
            state = state + self._attention(prefix, self._norm(prefix + "input_layernorm", state))
            state = state + self._mlp(prefix, self._norm(prefix + "post_attention_layernorm", state))
        return self._norm("model.norm", state) @ self._weight("lm_head").t()

    def _weight(self, name: str) -> torch.Tensor:
        return self.get_parameter(f"{name}.weight")

    def _norm(self, name: str, state: torch.Tensor) -> torch.Tensor:
        return rms_norm(state, (self.shape.hidden,), self._weight(name), NORM_EPS)

    def _parts(self, prefix: str, fused: str, names: tuple[str, ...], rows: list[int]) -> list[torch.Tensor]:
        if self.shape.fused:
            return list(torch.split(self._weight(prefix + fused), rows))
        return [self._weight(prefix + name) for name in names]

    def _attention(self, prefix: str, state: torch.Tensor) -> torch.Tensor:
        shape = self.shape
        kv_rows = shape.kv_heads * shape.head_dim
        names = ("q_proj", "k_proj", "v_proj")
        weights = self._parts(prefix + "self_attn.", "qkv_proj", names, [shape.hidden, kv_rows, kv_rows])
        query, key, value = (
            torch.unflatten(state @ weight.t(), -1, (-1, shape.head_dim)).transpose(1, 2)
            for weight in weights
        )
        repeat = shape.heads // shape.kv_heads
        out = scaled_dot_product_attention(
            query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1), is_causal=True
        )
        return out.transpose(1, 2).flatten(-2) @ self._weight(prefix + "self_attn.o_proj").t()

    def _mlp(self, prefix: str, state: torch.Tensor) -> torch.Tensor:
        rows = [self.shape.ffn, self.shape.ffn]
        gate, up = self._parts(prefix + "mlp.", "gate_up_proj", ("gate_proj", "up_proj"), rows)
        return (silu(state @ gate.t()) * (state @ up.t())) @ self._weight(prefix + "mlp.down_proj").t()


def _parameter_shapes(shape: GeneratorShape) -> dict[str, tuple[int, ...]]:
    """Parameters end where their last slice ends."""
    shapes: dict[str, tuple[int, ...]] = {}
    for piece in generator_slices(shape):
        ends = tuple(o + n for o, n in zip(piece.parameter_offset, piece.shape, strict=True))
        known = shapes.get(piece.parameter, ends)
        shapes[piece.parameter] = tuple(map(max, known, ends))
    return shapes


def _attach(root: nn.Module, path: str, leaf: nn.Module) -> None:
    *parents, name = path.split(".")
    for parent in parents:
        if parent not in root._modules:
            root.add_module(parent, nn.Module())
        root = root.get_submodule(parent)
    root.add_module(name, leaf)


def expected_parameters(shape: GeneratorShape, reference: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What the rank's parameters must hold for the whole model `reference` (Hugging Face names)."""
    some = next(iter(reference.values()))
    expected = {n: torch.zeros(s, dtype=some.dtype) for n, s in _parameter_shapes(shape).items()}
    for piece in generator_slices(shape):
        source = reference[piece.hf_name][_box(piece.hf_offset, piece.shape)]
        expected[piece.parameter][_box(piece.parameter_offset, piece.shape)] = source
    return expected


def _box(offset: tuple[int, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    return tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))
