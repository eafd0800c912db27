"""What a conversion may be made of, and how everything else is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor

from modelexpress_rl.errors import UsageError
from modelexpress_rl.train.engines.fsdp.context import FSDPTrainerContext
from tests.train.fsdp.support import assemble, differing, numbered, parts_of_boxes


def published(convert: Any, tensors: dict[str, Tensor], **fields: Any) -> dict[str, Tensor]:
    """What an adapter lends of whole tensors, by this conversion."""
    context = FSDPTrainerContext(**{"wire_dtype": None, "convert_native_to_hf": convert, **fields})
    adapter = context.create_adapter()
    adapter.bind_tensors(tensors)
    return assemble([parts_of_boxes(adapter.boxes())])


def split_and_stack(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Fused rows to their parts, experts one by one, a transposition, and several to one."""
    q, k, v = tensors["qkv"].split([4, 2, 2])
    gate, up = tensors["gate_up"].chunk(2, dim=-1)
    named = {"q": q, "k": k, "v": v, "gate": gate, "up": up}
    named |= {f"experts.{index}": one for index, one in enumerate(tensors["experts"].unbind())}
    named["all.experts"] = torch.stack([tensors["a"], tensors["b"]])
    named["ab"] = torch.cat([tensors["a"], tensors["b"].to("cpu")]).contiguous()
    named["at"] = tensors["a"].t().contiguous()
    return named


def natives() -> dict[str, Tensor]:
    return {
        "qkv": numbered(8, 6),
        "gate_up": numbered(3, 10, start=100),
        "experts": numbered(3, 4, 2, start=200),
        "a": numbered(2, 5, start=300),
        "b": numbered(2, 5, start=400),
    }


def test_everything_is_the_trainers_own_memory() -> None:
    tensors = natives()
    adapter = FSDPTrainerContext(wire_dtype=None, convert_native_to_hf=split_and_stack).create_adapter()
    adapter.bind_tensors(tensors)
    boxes = adapter.boxes()
    memory = [(one.data_ptr(), one.data_ptr() + one.nbytes) for one in tensors.values()]
    for box in boxes:
        assert any(begin <= box.addr and box.addr + box.size_bytes <= end for begin, end in memory)
    assert differing(assemble([parts_of_boxes(boxes)]), split_and_stack(tensors)) == []
    for tensor in tensors.values():  # training in place shows through
        tensor.add_(1)
    assert adapter.boxes() is boxes
    assert differing(assemble([parts_of_boxes(boxes)]), split_and_stack(tensors)) == []


def test_the_dict_may_be_changed_in_place() -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["x"] = tensors.pop("w")[1:]

    assert differing(published(rename, {"w": numbered(3, 2)}), {"x": numbered(3, 2)[1:]}) == []


def test_it_is_traced_once_for_all_adapters_of_a_context() -> None:
    calls = []

    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        assert all(tensor.is_meta for tensor in tensors.values())
        calls.append(len(tensors))
        return tensors

    context = FSDPTrainerContext(wire_dtype=None, convert_native_to_hf=convert)
    for step in range(3):
        adapter = context.create_adapter()
        adapter.bind_tensors({"w": numbered(3, start=step)})
        adapter.boxes()
    assert calls == [1]
    context.create_adapter().bind_tensors({"w": numbered(4)})  # another shape is another layout
    assert calls == [1, 1]


def test_a_cast_in_the_conversion_is_the_wire_dtype() -> None:
    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"w": tensors["w"].to(torch.float16), "same": tensors["w"].to(torch.float32).float()}

    context = FSDPTrainerContext(wire_dtype=None, convert_native_to_hf=convert)
    adapter = context.create_adapter()
    adapter.bind_tensors({"w": numbered(3)})
    with pytest.raises(UsageError, match=r"tensor 'w': is torch.float32 and its wire dtype is torch.float16"):
        adapter.boxes()


REFUSED: dict[str, tuple[Any, str]] = {
    "arithmetic": (
        lambda t: {"x": t["w"] * 2},
        "tensor 'x': convert_native_to_hf makes it by aten.mul.Tensor, which is no view",
    ),
    "a slice of arithmetic": (lambda t: {"x": (t["w"] + 1)[:2]}, "tensor 'x': .* aten.add.Tensor"),
    "arithmetic in a concatenation": (
        lambda t: {"x": torch.cat([t["w"], -t["w"]])},
        "tensor 'x': .* aten.neg.default",
    ),
    "in place": (lambda t: {"x": t["w"].mul_(2)}, "tensor 'x': .* aten.mul_.Tensor"),
    "an index": (
        lambda t: {"x": t["w"][torch.tensor([2, 0], device="meta")]},
        "tensor 'x': .* aten.index.Tensor",
    ),
    "across dimensions": (
        lambda t: {"x": t["w"].reshape(-1)[1:7]},
        r"tensor 'x': .* takes \(6,\) out of \(4, 3\) across its dimensions by aten.slice.Tensor",
    ),
    "other bytes": (
        lambda t: {"x": t["w"].view(torch.int32)},
        "tensor 'x': .* looks at the bytes of torch.float32 as torch.int32 by aten.view.dtype",
    ),
    "two casts": (
        lambda t: {"x": t["w"].bfloat16().float()},
        "tensor 'x': .* casts it twice, by aten._to_copy.default last",
    ),
    "values": (
        lambda t: {"x": t["w"][: int(t["w"].sum())]},
        "convert_native_to_hf: failed on tensors without storage",
    ),
    "a missing name": (lambda t: {"x": t["nothing"]}, "convert_native_to_hf: failed .* KeyError: 'nothing'"),
    "no tensor": (lambda t: {"x": 3}, "tensor 'x': convert_native_to_hf gave int, not a tensor"),
    "no mapping": (lambda t: [t], "convert_native_to_hf: expected a mapping .* got list"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_can_not_be_expressed_is_refused(case: str) -> None:
    convert, problem = REFUSED[case]
    with pytest.raises(UsageError, match=re.compile(problem, re.DOTALL)):
        published(convert, {"w": numbered(4, 3)})


def test_a_tensor_of_the_conversions_own_is_refused() -> None:
    own = torch.zeros(2)
    with pytest.raises(
        UsageError, match=r"tensor 'x': convert_native_to_hf gave a tensor that is not made of"
    ):
        published(lambda _: {"x": own}, {"w": numbered(3)})


def test_a_layout_in_too_many_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modelexpress_rl.train.engines.fsdp.adapter.MAX_BOXES", 11)
    with pytest.raises(UsageError, match=r"tensor 'x': lies in 12 pieces of memory, as aten.* leaves it"):
        published(lambda t: {"x": t["w"].t()}, {"w": numbered(4, 3)})


def test_a_conversion_may_leave_tensors_out() -> None:
    def convert(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"a": tensors["a"]}

    assert differing(published(convert, {"a": numbered(2), "b": numbered(3)}), {"a": numbered(2)}) == []
