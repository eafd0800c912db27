"""A conversion of native tensors in front of a module's `load_weights`, captured with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from modelexpress_rl.errors import UsageError
from modelexpress_rl.inference.engines.torch.capture import CaptureRefused, capture
from modelexpress_rl.inference.engines.torch.converting import Convert, converting
from tests.inference.capture.support import Loads, installed, numbered, parameter, published


def to_hf(native: dict[str, Any]) -> dict[str, Any]:
    """Fused rows apart, stacked experts one by one and transposed, and a name of its own."""
    q, k = native["attention.qk"].split([4, 2])
    experts = {f"experts.{i}.w": one.t() for i, one in enumerate(native["experts"].unbind())}
    return {"q": q, "k": k, "norm": native["ln"], **experts}


def load(module: Any, weights: dict[str, torch.Tensor]) -> set[str]:
    """What an engine's model loads: k before q, and its own of two experts."""
    module.kq.data[:2].copy_(weights["k"])
    module.kq.data[2:].copy_(weights["q"])
    module.expert.data.copy_(weights["experts.1.w"])
    module.norm.data.copy_(weights["norm"])
    return {"kq", "expert", "norm"}


def module() -> Loads:
    return Loads(load, kq=parameter(6, 3), expert=parameter(2, 5), norm=parameter(3))


NATIVE = numbered(attention__qk=(6, 3), experts=(2, 5, 2), ln=(3,))


class Converted(Loads):
    """Loads native tensors as the conversion has it: the reference."""

    def load_weights(self, weights: Any) -> Any:
        return super().load_weights(to_hf(dict(weights)).items())


@pytest.mark.parametrize("in_place", [False, True])
def test_only_what_the_rank_takes_of_the_native_tensors_is_read(in_place: bool) -> None:
    def change(native: dict[str, Any]) -> None:
        converted = to_hf(native)
        native.clear()
        native.update(converted)

    convert: Convert = change if in_place else to_hf
    reference = Converted(load, kq=parameter(6, 3), expert=parameter(2, 5), norm=parameter(3))
    needs = installed(module(), NATIVE, reference=reference, load_weights=converting(convert))
    read = {need.name: (need.offset, need.shape) for need in needs}
    assert read["experts"] == ((1, 0, 0), (1, 5, 2))
    assert {need.name for need in needs} == set(NATIVE)


def test_what_goes_wrong_is_said_of_the_conversion() -> None:
    def missing(native: dict[str, Any]) -> dict[str, Any]:
        return {"q": native["nothing"]}

    with pytest.raises(UsageError, match="convert_native_to_hf: failed: KeyError: 'nothing'"):
        capture(module(), published(NATIVE), load=converting(missing))

    def computed(native: dict[str, Any]) -> dict[str, Any]:
        return to_hf({**native, "ln": native["ln"] + 1})

    with pytest.raises(
        CaptureRefused, match=r"parameter .norm. gets the result of aten\.add\.Tensor on tensor .ln."
    ):
        capture(module(), published(NATIVE), load=converting(computed))
