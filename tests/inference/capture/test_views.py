"""Which boxes a chain of views reads, and that the copies put every element in its place."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.inference.capture.support import Loads, installed, needs_of, numbered, parameter

View = Callable[[torch.Tensor], torch.Tensor]
W = (8, 6)


@pytest.mark.parametrize(
    ("view", "boxes"),
    [
        (lambda w: w, [((0, 0), (8, 6))]),
        (lambda w: w.narrow(0, 2, 4), [((2, 0), (4, 6))]),
        (lambda w: w[2:6, 1:3], [((2, 1), (4, 2))]),
        (lambda w: w[3], [((3, 0), (1, 6))]),
        (lambda w: w[:, -1], [((0, 5), (8, 1))]),
        (lambda w: w.select(1, 2), [((0, 2), (8, 1))]),
        (lambda w: w.unbind(0)[1], [((1, 0), (1, 6))]),
        (lambda w: w.chunk(2)[1], [((4, 0), (4, 6))]),
        (lambda w: w.split([2, 5, 1])[1], [((2, 0), (5, 6))]),
        (lambda w: w.tensor_split(3)[2], [((6, 0), (2, 6))]),
        (lambda w: w.view(2, 4, 6)[1], [((4, 0), (4, 6))]),
        (lambda w: w.view(2, 4, 6)[:, 1], [((1, 0), (5, 6))]),
        (lambda w: w.reshape(-1)[6:18], [((1, 0), (2, 6))]),
        (lambda w: w.flatten()[3:21], [((0, 3), (1, 3)), ((1, 0), (2, 6)), ((3, 0), (1, 3))]),
        (lambda w: w.t()[2:4], [((0, 2), (8, 2))]),
        (lambda w: w.T, [((0, 0), (8, 6))]),
        (lambda w: w.transpose(0, 1)[:, 2:4], [((2, 0), (2, 6))]),
        (lambda w: w.permute(1, 0).contiguous()[1:3], [((0, 1), (8, 2))]),
        (lambda w: w.unsqueeze(0).squeeze(0)[0:1], [((0, 0), (1, 6))]),
        (lambda w: w.contiguous().clone()[4:], [((4, 0), (4, 6))]),
        (lambda w: w.t().reshape(-1)[8:24], [((0, 1), (8, 2))]),
        (lambda w: w.t().reshape(3, 16)[1, 2:10], [((0, 3), (2, 1)), ((2, 2), (6, 1))]),
        (lambda w: w.view(4, 2, 6).transpose(0, 1).reshape(8, 6)[:4], [((0, 0), (7, 6))]),
        (lambda w: w[::2], [((0, 0), (7, 6))]),
        (lambda w: w[1, 2], [((1, 2), (1, 1))]),
        (lambda w: w[0, 0].expand(3), [((0, 0), (1, 1))]),
        (lambda w: w.to(torch.bfloat16)[1:3], [((1, 0), (2, 6))]),
        (lambda w: w.half().float()[:, 1:2], [((0, 1), (8, 1))]),
        (lambda w: w.view(torch.int32)[:2].view(torch.float32), [((0, 0), (2, 6))]),
        (lambda w: torch.cat([w[6:], w[:2]]), [((0, 0), (2, 6)), ((6, 0), (2, 6))]),
        (lambda w: torch.stack([w[0], w[4]])[1], [((4, 0), (1, 6))]),
        (lambda w: torch.cat([w, w], dim=1)[:, 4:8], [((0, 0), (8, 2)), ((0, 4), (8, 2))]),
        (lambda w: torch.nn.functional.pad(w[:2], (0, 2, 1, 0)), [((0, 0), (2, 6))]),
        (lambda w: w[1:3].repeat(2, 1)[1:3], [((1, 0), (2, 6))]),
        (lambda w: w[:2, :2].tile(2, 2), [((0, 0), (2, 2))]),
        (lambda w: w[2:4].repeat_interleave(2, dim=0)[:2], [((2, 0), (1, 6))]),
        (lambda w: w[torch.tensor([5, 6, 1, -1])], [((1, 0), (1, 6)), ((5, 0), (3, 6))]),
        (lambda w: w[:, [3, 1]], [((0, 1), (8, 1)), ((0, 3), (8, 1))]),
        (lambda w: w.index_select(1, torch.arange(3, 5)), [((0, 3), (8, 2))]),
        (lambda w: w.narrow_copy(0, 1, 2), [((1, 0), (2, 6))]),
        (lambda w: w.unfold(0, 4, 2)[1], [((2, 0), (4, 6))]),
        (lambda w: w.movedim(0, 1)[0], [((0, 0), (8, 1))]),
        (lambda w: w.swapaxes(0, 1)[0], [((0, 0), (8, 1))]),
    ],
)  # fmt: skip
def test_a_view_reads_its_box(view: View, boxes: list[Any]) -> None:
    tensors = numbered(w=W)
    module = Loads(
        lambda self, named: self.p.data.copy_(view(named["w"])), p=parameter(*view(tensors["w"]).shape)
    )
    assert needs_of(module, tensors) == {"w": boxes}
    installed(module, tensors)
