"""Loaders as engines have them: fused, sharded, padded, by expert map; and what each rank reads of what."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from tests.inference.capture.models import Engine, Parallel, Shape, checkpoint
from tests.inference.capture.support import (
    Loads,
    Weights,
    captured,
    installed,
    needs_of,
    numbered,
    parameter,
    published,
    staged,
    values,
)

SHAPE = Shape()
RANKS = [
    Parallel(r, n, e, m)
    for n, m in ((1, 1), (2, 1), (4, 2))
    for r, e in itertools.product(range(n), range(m))
]


@pytest.mark.parametrize("parallel", RANKS, ids=str)
def test_a_rank_of_an_engine_reads_what_it_loads_and_nothing_else(parallel: Parallel) -> None:
    tensors = checkpoint(SHAPE)
    needs = installed(Engine(SHAPE, parallel), tensors, reference=Engine(SHAPE, parallel))
    names = {need.name for need in needs}
    assert not any("inv_freq" in name or "lm_head" in name for name in names)
    read: dict[str, int] = {}
    for need in needs:
        kind = need.name.split(".")[-2]
        read[kind] = read.get(kind, 0) + int(np.prod(need.shape))
    layers, size = SHAPE.layers, parallel.size
    kv_size = min(size, SHAPE.kv_heads)
    experts = layers * SHAPE.experts // parallel.expert_size
    inner = SHAPE.inner // size * SHAPE.hidden
    assert read["q_proj"] == read["o_proj"] == layers * 16 // size * SHAPE.hidden
    assert read["k_proj"] == read["v_proj"] == layers * 8 // kv_size * SHAPE.hidden
    assert read["gate_proj"] == read["up_proj"] == read["down_proj"] == layers * inner
    assert read["gate"] == read["up"] == read["down"] == experts * inner
    rows = min(max(SHAPE.vocabulary - parallel.rank * (24 if size == 1 else 16 if size == 2 else 8), 0), 24)
    assert read.get("embed_tokens", 0) <= rows * SHAPE.hidden


def test_the_ranks_of_an_engine_read_every_element_that_is_loaded() -> None:
    tensors = checkpoint(SHAPE)
    ranks = [Parallel(r, 4, e, 2) for r, e in itertools.product(range(4), range(2))]
    seen = {name: torch.zeros(t.shape, dtype=torch.bool) for name, t in tensors.items()}
    for parallel in ranks:
        for need in captured(Engine(SHAPE, parallel), tensors).needs:
            box = tuple(slice(o, o + n) for o, n in zip(need.offset, need.shape, strict=True))
            seen[need.name][box] = True
    unread = {name for name, mask in seen.items() if not mask.all()}
    assert unread == {"lm_head.weight", "layers.0.rotary.inv_freq", "layers.1.rotary.inv_freq"}


def test_captures_are_deterministic() -> None:
    tensors = checkpoint(SHAPE)
    first, second = (captured(Engine(SHAPE, RANKS[-1]), tensors) for _ in range(2))
    assert first.needs == second.needs
    assert [(c.target, c.transfer, c.need) for c in first.copies] == [
        (c.target, c.transfer, c.need) for c in second.copies
    ]


class Normalised(torch.nn.Sequential):
    """Loads as Hugging Face modules do: a plain state dict, buffers and a count of steps among it."""

    def __init__(self) -> None:
        super().__init__(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))

    def load_weights(self, weights: Weights) -> None:
        self.load_state_dict(dict(weights))


def test_a_state_dict_is_loaded_through_load_state_dict() -> None:
    module = Normalised()
    tensors = {
        name: values(tuple(t.shape), t.dtype, begin=2 + i)
        for i, (name, t) in enumerate(module.state_dict().items())
    }
    assert set(needs_of(module, tensors)) == set(tensors)
    installed(module, tensors)


def test_one_tensor_goes_into_two_parameters_and_is_read_once() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.a.data.copy_(named["w"])
        self.b.data.copy_(named["w"].t())

    tensors = numbered(w=(4, 6))
    module = Loads(load, a=parameter(4, 6), b=parameter(6, 4))
    assert needs_of(module, tensors) == {"w": [((0, 0), (4, 6))]}
    installed(module, tensors)


def test_overlapping_slices_of_a_tensor_are_read_once() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.a.data.copy_(named["w"][:5])
        self.b.data.copy_(named["w"][3:7])

    tensors = numbered(w=(8, 2))
    module = Loads(load, a=parameter(5, 2), b=parameter(4, 2))
    assert needs_of(module, tensors) == {"w": [((0, 0), (7, 2))]}
    installed(module, tensors)


def test_a_slice_that_lies_in_a_bigger_one_is_no_read_of_its_own() -> None:
    """Merging boxes may leave one inside another: nothing was found in it, which ended in a KeyError."""
    slices = {
        "a": (slice(0, 1), slice(2, 4)),
        "b": (slice(2, 3), slice(1, 2)),
        "c": (slice(1, 2), slice(1, 4)),
        "d": (slice(0, 4), slice(1, 3)),
    }
    shapes = {"a": (1, 2), "b": (1, 1), "c": (1, 3), "d": (4, 2)}

    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        for name, where in slices.items():
            getattr(self, name).data.copy_(named["w"][where])

    module = Loads(load, **{name: parameter(*shape) for name, shape in shapes.items()})
    needs = installed(module, numbered(w=(4, 4)))
    assert ((2, 1), (1, 1)) not in [(need.offset, need.shape) for need in needs]


def test_what_is_overwritten_is_not_read() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.p.data.copy_(named["embed"])
        self.p.data.copy_(named["head"])

    tensors = numbered(embed=(4, 2), head=(4, 2))
    module = Loads(load, p=parameter(4, 2))
    assert set(needs_of(module, tensors)) == {"head"}
    installed(module, tensors)


def test_later_copies_lie_over_earlier_ones() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.p.data.copy_(named["a"])
        self.p.data[1:3] = named["b"]

    installed(Loads(load, p=parameter(4, 2)), numbered(a=(4, 2), b=(2, 2)))


def test_casts_are_made_copy_by_copy() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.p.data[:2] = named["w"].to(torch.bfloat16).to(torch.float32)
        self.p.data[2:] = named["w"]
        self.q.data.copy_(named["w"].half())
        self.r.data.copy_(named["w"].float().contiguous().t().float())

    tensors = {"w": (torch.arange(6) / 7).reshape(2, 3)}
    module = Loads(load, p=parameter(4, 3), q=parameter(2, 3, dtype=torch.bfloat16), r=parameter(3, 2))
    assert needs_of(module, tensors) == {"w": [((0, 0), (2, 3))]}
    installed(module, tensors)


@pytest.mark.parametrize(
    "write",
    [
        lambda p, w: p.data.__setitem__(slice(None), w),
        lambda p, w: p.data.__setitem__(..., w),
        lambda p, w: p.__setitem__(slice(None), w),
        lambda p, w: p.data.view(-1).copy_(w.reshape(-1)),
        lambda p, w: p.data.t().copy_(w.t()),
        lambda p, w: p.detach().copy_(w),
        lambda p, w: p.copy_(w, non_blocking=True),
        lambda p, w: [p.data[i].copy_(w[i]) for i in range(4)],
        lambda p, w: [p.data[:, i].copy_(w[:, i]) for i in range(6)],
        lambda p, w: [p.data[0::2].copy_(w[:2]), p.data[1::2].copy_(w[2:])],
        lambda p, w: p.data.view(2, 2, 6).unbind(1)[0].copy_(w[:2]) is p.data[1::2].copy_(w[2:]),
        lambda p, w: p.data.view(torch.int32).copy_(w.view(torch.int32)),
        lambda p, w: torch._foreach_copy_([p.data[:2], p.data[2:]], [w[:2], w[2:]]),
        lambda p, w: setattr(p, "data", w),
        lambda p, w: setattr(p, "data", w.clone()),
        lambda p, w: p.data.fill_(7),
        lambda p, w: p.data.zero_(),
        lambda p, w: p.data.fill_(w[1, 2]),
        lambda p, w: p.data.copy_(w[1]),
        lambda p, w: p.data.__setitem__((slice(None), 2), w[0, 0]) or p.data[:, :2].copy_(w[:, :2])
        is p.data[:, 3:].fill_(2),
        lambda p, w: p.data.copy_(torch.arange(24.0).view(4, 6)),
        lambda p, w: p.data.copy_(torch.full_like(p, 3.0)),
        lambda p, w: w.is_pinned() or p.data.copy_(w.to(p)),
        lambda p, w: p.data.copy_(w) if w.is_same_size(p) and w.is_cpu and not p.is_meta else None,
        lambda p, w: p.data.narrow(0, 0, 4).narrow(1, 0, 6).copy_(w.to(p.device, p.dtype)),
    ],
)  # fmt: skip
def test_ways_to_write_a_parameter(write: Any) -> None:
    installed(Loads(lambda self, named: write(self.p, named["w"]), p=parameter(4, 6)), numbered(w=(4, 6)))


def test_a_temporary_is_filled_and_copied() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        padded = torch.zeros(6, 3)
        padded[:4] = named["w"]
        self.a.data.copy_(padded[2:])
        joined = torch.empty_like(self.b)
        joined[:, :3].copy_(named["w"])
        joined[:, 3:] = named["w"]
        self.b.data.copy_(joined)

    installed(Loads(load, a=parameter(4, 3), b=parameter(4, 6)), numbered(w=(4, 3)))


def test_a_reordered_copy_is_narrowed_to_this_ranks_heads() -> None:
    """query_key_value stored head by head, and wanted as q, k, v: a reordering copy, then a rank's part."""
    heads, dim, hidden, rank = 4, 256, 32, 1

    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        fused = named["qkv"].view(heads, 3, dim, hidden).transpose(0, 1).reshape(3 * heads * dim, hidden)
        rows = heads * dim // 2
        for i in range(3):
            begin = i * heads * dim + rank * rows
            self.p.data[i * rows : (i + 1) * rows].copy_(fused[begin : begin + rows])

    tensors = numbered(qkv=(heads * 3 * dim, hidden))
    module = Loads(load, p=parameter(3 * heads * dim // 2, hidden))
    assert needs_of(module, tensors) == {"qkv": [((heads * 3 * dim // 2, 0), (heads * 3 * dim // 2, hidden))]}
    installed(module, tensors)


def test_a_stride_is_widened_and_said() -> None:
    tensors = numbered(w=(6, 5))
    module = Loads(lambda self, named: self.p.data.copy_(named["w"][:, 1::2]), p=parameter(6, 2))
    (widened,) = captured(module, tensors).widened
    assert (widened.name, widened.offset, widened.shape, widened.unused) == ("w", (0, 1), (6, 3), 6)
    installed(module, tensors)


def test_large_strided_parts_are_read_one_by_one() -> None:
    tensors = numbered(w=(4, 1024))
    module = Loads(lambda self, named: self.p.data.copy_(named["w"][::2]), p=parameter(2, 1024))
    assert needs_of(module, tensors) == {"w": [((0, 0), (1, 1024)), ((2, 0), (1, 1024))]}
    assert not captured(module, tensors).widened
    installed(module, tensors)


def test_loaders_that_take_keywords_only_or_yield() -> None:
    class Keywords(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = parameter(2)

        def load_weights(self, *, named: Weights) -> Iterator[str]:
            for name, loaded in named:
                self.get_parameter(name).data.copy_(loaded)
                yield name

    assert [need.name for need in captured(Keywords(), numbered(p=(2,))).needs] == ["p"]


def test_control_by_a_buffer_is_no_control_by_a_published_value() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        for row, begin in enumerate(self.order.tolist()):
            self.p.data[row] = named["w"][begin]
        if bool((self.order > 1).any()) and self.order.numpy()[0] == 2:
            self.q.data.copy_(named["w"][int(self.order[0])])
        self.q.data[0] = self.order.float()[1]

    module = Loads(load, p=parameter(3, 2), q=parameter(2))
    module.register_buffer("order", torch.tensor([2, 0, 1]))
    installed(module, numbered(w=(3, 2)))


def test_live_tensors_that_only_a_closure_names_are_not_written() -> None:
    live = parameter(2, 2)
    views = [live.data[0], live.data[1]]
    hidden = {"param": live}

    class Shared:
        """An object that is not copied: it says itself how."""

        def __reduce__(self) -> Any:
            raise TypeError("no")

        def load(self, loaded: torch.Tensor) -> None:
            hidden["param"].data = loaded
            hidden["param"].data[0] = loaded[1]
            views[1].copy_(loaded[0])

    shared = Shared()
    module = Loads(lambda self, named: shared.load(named["w"]), p=live)
    found = captured(module, numbered(w=(2, 2)))
    assert len(found.copies) == 3


def test_loaders_that_hang_on_parameters_see_the_twin() -> None:
    module = Loads(lambda self, named: [self.p.load(named["w"]) for _ in range(2)], p=parameter(4))
    calls: list[int] = []

    def load(param: Any, state: list[int], loaded: torch.Tensor) -> None:
        state.append(1)
        param.seen = True
        param.data.copy_(loaded)

    module.p.load = functools.partial(load, module.p, calls)  # type: ignore[union-attr]
    captured(module, numbered(w=(4,)))
    assert calls == []
    assert not hasattr(module.p, "seen")


def test_aliases_hand_a_tensor_out_under_another_name() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.embed.data.copy_(named["embed"])
        self.head.data.copy_(named["head"])

    module = Loads(load, embed=parameter(4, 2), head=parameter(4, 2))
    found = captured(module, numbered(embed=(4, 2)), aliases={"head": "embed"})
    assert [need.name for need in found.needs] == ["embed"]
    assert [copy.target.name for copy in found.copies] == ["embed", "head"]


class Flat(Loads):
    """Parameters that are views of one buffer, which the loader writes."""

    def __init__(self) -> None:
        flat = torch.full((10,), -1.0)
        a, b = (
            torch.nn.Parameter(each, requires_grad=False)
            for each in (flat[:4].view(2, 2), flat[4:].view(2, 3))
        )
        super().__init__(self._into_flat, a=a, b=b)
        self.flat = flat

    @staticmethod
    def _into_flat(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.a.data.copy_(named["a"])
        self.flat[4:].copy_(named["b"].reshape(-1))


def test_parameters_that_share_a_storage() -> None:
    tensors = numbered(a=(2, 2), b=(2, 3))
    assert [copy.target.name for copy in captured(Flat(), tensors).copies] == ["a", "b"]
    module = Flat()
    installed(module, tensors, reference=Flat())
    assert module.flat.tolist() == list(range(1, 11))


def test_parameters_that_need_gradients_or_inference_mode() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.p.copy_(named["w"].t())
        self.scale.copy_(named["s"])

    with torch.inference_mode():
        inference = Loads(load, p=parameter(2, 3), scale=parameter())
    trained = Loads(load, p=parameter(2, 3), scale=parameter())
    trained.p.requires_grad_(True)
    tensors = numbered(w=(3, 2), s=())
    for module in (inference, trained):
        loader = TorchGeneratorContext(module).create_adapter().loader(published(tensors))
        boxes = [staged(need, tensors) for need in loader.needs]
        for _ in range(2):
            loader.check(boxes)
            loader.install(boxes)
        assert module.p.tolist() == [[1, 3, 5], [2, 4, 6]]
        assert module.scale.item() == 7


def test_an_empty_tensor_and_a_scalar() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.empty.data.copy_(named["empty"])
        self.scale.data.copy_(named["scale"])
        self.scales.data[1] = named["scale"]
        self.scales.data[0] = 1.0

    module = Loads(load, empty=parameter(0, 3), scale=parameter(), scales=parameter(2))
    assert needs_of(module, {**numbered(scale=()), "empty": torch.zeros(0, 3)}) == {"scale": [((), ())]}
    installed(module, {**numbered(scale=()), "empty": torch.zeros(0, 3)})
