"""The demo's generator: the slices of every rank fill its parameters, whatever the sizes."""

from __future__ import annotations

import pytest
import torch

from modelexpress_rl.cli.demo.generator_model import (
    GeneratorModel,
    GeneratorShape,
    expected_parameters,
    generator_slices,
)
from modelexpress_rl.errors import StateError

SIZES = {"hidden": 32, "layers": 2, "heads": 8, "kv_heads": 2, "ffn": 48, "vocab": 64, "seq": 8}


def whole_weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    shapes = {s.hf_name: s.hf_shape for s in generator_slices(GeneratorShape(**SIZES))}
    return {name: torch.randn(shape) * 0.2 for name, shape in shapes.items()}


@pytest.mark.parametrize("tie", [False, True])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("size", [1, 2, 4, 8])
def test_slices_fill_every_parameter_exactly_once(size: int, fused: bool, tie: bool) -> None:
    for rank in range(size):
        shape = GeneratorShape(**SIZES, tp_size=size, tp_rank=rank, fused=fused, tie=tie)
        counts = {name: torch.zeros(p.shape) for name, p in GeneratorModel(shape).named_parameters()}
        for piece in generator_slices(shape):
            box = tuple(slice(o, o + n) for o, n in zip(piece.parameter_offset, piece.shape, strict=True))
            counts[piece.parameter][box] += 1
            ends = [o + n for o, n in zip(piece.hf_offset, piece.shape, strict=True)]
            assert all(end <= full for end, full in zip(ends, piece.hf_shape, strict=True))
        assert all(bool((count == 1).all()) for count in counts.values())
        assert ("lm_head.weight" in counts) is not tie


def test_ranks_share_a_kv_head_where_there_are_fewer() -> None:
    starts = [
        next(s.hf_offset[0] for s in generator_slices(GeneratorShape(**SIZES, tp_size=4, tp_rank=rank))
             if s.hf_name.endswith("k_proj.weight"))
        for rank in range(4)
    ]  # fmt: skip
    assert starts == [0, 0, 4, 4]


def test_fused_parts_lie_one_below_the_other() -> None:
    weights = whole_weights()
    shape = GeneratorShape(**SIZES, tp_size=2, tp_rank=1, fused=True)
    parameters = expected_parameters(shape, weights)
    prefix = "model.layers.1.self_attn."
    parts = [weights[f"{prefix}{n}_proj.weight"].chunk(2)[1] for n in "qkv"]
    assert torch.equal(parameters[f"{prefix}qkv_proj.weight"], torch.cat(parts))
    assert torch.equal(parameters[f"{prefix}o_proj.weight"], weights[f"{prefix}o_proj.weight"].chunk(2, 1)[1])
    GeneratorModel(shape).load_state_dict(parameters)


def test_fused_and_plain_compute_the_same() -> None:
    weights = whole_weights()
    outputs = []
    for fused in (False, True):
        shape = GeneratorShape(**SIZES, fused=fused)
        model = GeneratorModel(shape)
        model.load_state_dict(expected_parameters(shape, weights))
        outputs.append(model(torch.tensor([[1, 2, 3, 4]])))
    assert outputs[0].abs().max() > 0
    torch.testing.assert_close(outputs[0], outputs[1])


def test_a_part_does_not_compute() -> None:
    part = GeneratorModel(GeneratorShape(**SIZES, tp_size=2, tp_rank=0))
    with pytest.raises(StateError, match="forward needs the whole model, this is one of 2 parts"):
        part(torch.tensor([[1]]))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tp_size": 2, "tp_rank": 2}, "tp_rank: expected 0 to 1, got 2"),
        ({"heads": 5}, "heads: "),
        ({"tp_size": 16}, "heads: 8 can't be divided among 16 ranks"),
        ({"vocab": 63, "tp_size": 2}, "vocab: 63 can't be divided among 2 ranks"),
        ({"heads": 6, "hidden": 36, "kv_heads": 3, "tp_size": 2}, "kv_heads: 3 can't be laid on 2 ranks"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(change: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        GeneratorShape(**(SIZES | change))
