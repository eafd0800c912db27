"""Random chains of views and copies, on both sides, against the real tensors (Hypothesis)."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from modelexpress_rl.inference.engines.torch.capture import strided
from modelexpress_rl.inference.engines.torch.capture.filling import unfilled
from modelexpress_rl.inference.engines.torch.capture.reading import boxes_of, hull, located, worth_a_read
from modelexpress_rl.inference.engines.torch.capture.strided import Axes, Transfer, aligned
from tests.inference.capture.support import Loads, captured, installed, numbered, parameter

Step = Callable[[torch.Tensor], torch.Tensor]
SHAPES = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(tuple)
many = settings(
    max_examples=int(os.environ.get("MX_TEST_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=list(HealthCheck),
)


def without_memory(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, device="meta")


@st.composite
def views(draw: Any, probe: torch.Tensor, *, copies: bool, most: int = 6) -> Step:
    """A chain of operations on a tensor like `probe` that stay views, or of copies, too."""
    steps: list[Step] = []
    for _ in range(draw(st.integers(0, most))):
        step = draw(_step(tuple(probe.shape), copies=copies))
        try:
            probe = step(probe)
        except RuntimeError:
            continue  # a view that would not be one
        steps.append(step)

    def run(tensor: torch.Tensor) -> torch.Tensor:
        for step in steps:
            tensor = step(tensor)
        return tensor

    return run


@st.composite
def _step(draw: Any, shape: tuple[int, ...], *, copies: bool) -> Step:
    kinds = [
        "narrow",
        "stride",
        "select",
        "transpose",
        "permute",
        "split",
        "unsqueeze",
        "squeeze",
        "view",
        "unbind",
    ]
    if copies:
        kinds += [
            "contiguous",
            "clone",
            "reshape",
            "flatten",
            "half",
            "cat",
            "stack",
            "pad",
            "expand",
            "unfold",
            "pick",
            "repeat",
        ]
        kinds += ["diagonal"]
    kind = draw(st.sampled_from(kinds))
    if not shape:
        return lambda t: t.unsqueeze(0)
    axis = draw(st.integers(0, len(shape) - 1))
    extent = shape[axis]
    first = draw(st.integers(0, max(extent - 1, 0)))
    last = draw(st.integers(first + 1, max(extent, first + 1)))
    step = draw(st.integers(1, 3))
    order = draw(st.permutations(range(len(shape))))
    groups = draw(_regrouped(shape))
    steps: dict[str, Step] = {
        "narrow": lambda t: t.narrow(axis, first, last - first),
        "stride": lambda t: t[(slice(None),) * axis + (slice(first, last, step),)],
        "select": lambda t: t.select(axis, first),
        "transpose": lambda t: t.transpose(axis, order[0]),
        "permute": lambda t: t.permute(order),
        "split": lambda t: t.split(step, axis)[0],
        "unsqueeze": lambda t: t.unsqueeze(axis),
        "squeeze": lambda t: t.squeeze(),
        "view": lambda t: t.view(groups),
        "unbind": lambda t: t.unbind(axis)[first],
        "contiguous": lambda t: t.contiguous(),
        "clone": lambda t: t.clone(),
        "reshape": lambda t: t.reshape(groups),
        "flatten": lambda t: t.flatten(),
        "half": lambda t: t.half().float(),
        "cat": lambda t: torch.cat([t, t.narrow(axis, first, last - first)], axis),
        "stack": lambda t: torch.stack([t, t], axis),
        "pad": lambda t: torch.nn.functional.pad(t, (step, 1), value=9.0),
        "expand": lambda t: t.unsqueeze(0).expand(2, *t.shape),
        "unfold": lambda t: t.unfold(axis, min(2, t.shape[axis]), 1),
        "pick": lambda t: t[[-1, 0, 0]],
        "repeat": lambda t: t.repeat(2, *(1,) * (t.dim() - 1)),
        "diagonal": lambda t: t.diagonal(0, 0, 1) if t.dim() > 1 else t,
    }
    return steps[kind]


@st.composite
def _regrouped(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Another shape of as many elements: neighbours multiplied, an extent divided."""
    out = list(shape)
    if len(out) > 1 and draw(st.booleans()):
        at = draw(st.integers(0, len(out) - 2))
        out[at : at + 2] = [out[at] * out[at + 1]]
    at = draw(st.integers(0, len(out) - 1))
    divisors = [d for d in range(1, out[at] + 1) if out[at] % d == 0] or [1]
    by = draw(st.sampled_from(divisors))
    out[at : at + 1] = [out[at] // by, by] if out[at] else [0, 1]
    return tuple(out)


@many
@given(data=st.data())
def test_views_and_copies_of_a_published_tensor(data: Any) -> None:
    shape = data.draw(SHAPES)
    run = data.draw(views(without_memory(shape), copies=True))
    tensors = numbered(w=shape)
    wanted = run(tensors["w"])
    if wanted.numel() > 4096:
        return
    module = Loads(lambda self, named: self.p.data.copy_(run(named["w"])), p=parameter(*wanted.shape))
    installed(module, tensors)


@many
@given(data=st.data())
def test_views_of_a_parameter_and_of_a_tensor(data: Any) -> None:
    """The same chain of views on both sides, laid over what an earlier copy wrote."""
    shape = data.draw(SHAPES)
    into = data.draw(views(without_memory(shape), copies=False))
    out_of = data.draw(views(into(without_memory(shape)), copies=True, most=3))

    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.p.data.copy_(named["w"])
        target = into(self.p.data)
        source = out_of(into(named["v"]))
        if source.dim() <= target.dim() and source.numel() == target.numel():
            target.copy_(source.reshape(target.shape))

    installed(Loads(load, p=parameter(*shape)), numbered(v=shape, w=shape))


@many
@given(data=st.data())
def test_what_stays_unfilled_is_counted(data: Any) -> None:
    shape = data.draw(SHAPES)
    chains = data.draw(st.lists(views(without_memory(shape), copies=False), min_size=1, max_size=3))
    filled, pieces = torch.zeros(shape, dtype=torch.bool), []
    axes = Axes.of(shape, strided.row_major(shape))
    assert axes is not None
    for chain in chains:
        view = chain(filled)
        view.fill_(True)
        if view.numel():
            place = int(view.storage_offset()), tuple(view.stride())
            pieces += aligned(Transfer.of(tuple(view.shape), place, place), axes)
    assert unfilled(shape, pieces) == int((~filled).sum())


@many
@given(data=st.data())
def test_boxes_hold_all_that_is_wanted_and_read_no_more_than_they_would_one_by_one(data: Any) -> None:
    shape = data.draw(SHAPES)
    chains = data.draw(st.lists(views(without_memory(shape), copies=False), min_size=1, max_size=4))
    tensor, pieces = torch.arange(float(torch.Size(shape).numel())).reshape(shape), []
    for chain in chains:
        view = chain(tensor)
        if view.numel():
            place = int(view.storage_offset()), tuple(view.stride())
            pieces += aligned(Transfer.of(tuple(view.shape), place, (0, place[1])), Axes.row_major(shape))
    size_bytes = data.draw(st.sampled_from([4, 4096]))
    wanted = [hull(part) for piece in pieces for part in worth_a_read(piece, size_bytes)]
    boxes = boxes_of(wanted)
    volumes = [int(torch.Size([h - low for low, h in zip(*box, strict=True)]).numel()) for box in boxes]
    singly = [int(torch.Size([h - low for low, h in zip(*box, strict=True)]).numel()) for box in set(wanted)]
    assert sum(volumes) <= sum(singly)
    for piece in pieces:
        got = []
        for local in located(piece, boxes, size_bytes):
            box = tensor[tuple(slice(low, high) for low, high in zip(*local.box, strict=True))].clone()
            dims = local.transfer.dims
            sizes, strides = [d.size for d in dims], [d.source for d in dims]
            got += box.as_strided(sizes, strides, local.transfer.source).reshape(-1).tolist()
        dims = piece.transfer.dims
        sizes, strides = [d.size for d in dims], [d.source for d in dims]
        assert sorted(got) == sorted(
            tensor.as_strided(sizes, strides, piece.transfer.source).reshape(-1).tolist()
        )


def test_a_view_in_too_many_pieces_is_refused_by_name() -> None:
    shape = (5000, 5000)
    module = Loads(lambda self, named: self.p.data.copy_(named["w"].diagonal()), p=parameter(5000))
    with pytest.raises(Exception, match=r"tensor 'w'.* more than 4096 boxes"):
        captured(module, {"w": torch.empty(shape, device="meta")})
