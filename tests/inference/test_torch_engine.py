"""Loading torch modules: fused, sharded, stacked, transposed, cast and tied parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from modelexpress_rl.errors import GeometryError, ModelExpressError, StateError, UsageError
from modelexpress_rl.inference.adapter import PublishedTensor, StagedTensor
from modelexpress_rl.inference.engines.torch import TensorSlice, TorchGeneratorContext
from modelexpress_rl.reshard.needs import Need


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> torch.Tensor:
    count = int(np.prod(shape))
    return (torch.arange(count, dtype=torch.float32) / 8).reshape(shape).to(dtype)


def published(tensors: Mapping[str, torch.Tensor]) -> dict[str, PublishedTensor]:
    return {name: PublishedTensor(str(t.dtype), tuple(t.shape)) for name, t in tensors.items()}


def staged(need: Need, tensors: Mapping[str, torch.Tensor]) -> StagedTensor:
    box = tensors[need.name][tuple(slice(o, o + n) for o, n in zip(need.offset, need.shape, strict=True))]
    flat = (
        box.contiguous().reshape(-1).view(torch.uint8) if box.numel() else torch.empty(0, dtype=torch.uint8)
    )
    return StagedTensor(need, flat.numpy().copy())


def install(context: TorchGeneratorContext, tensors: Mapping[str, torch.Tensor]) -> list[Need]:
    loader = context.create_adapter().loader(published(tensors))
    boxes = [staged(need, tensors) for need in loader.needs]
    loader.check(boxes)
    loader.install(boxes)
    return list(loader.needs)


class Bag(torch.nn.Module):
    """A module with the given parameters."""

    def __init__(self, **tensors: torch.Tensor) -> None:
        super().__init__()
        for name, value in tensors.items():
            self.register_parameter(name, torch.nn.Parameter(torch.zeros_like(value), requires_grad=False))


def test_plain_parameters_and_a_trained_buffer() -> None:
    module = Bag(w=tensor((4, 3)))
    module.register_buffer("scale", torch.zeros(3))
    module.register_buffer("rotary", torch.full((2,), 7.0), persistent=False)
    module.register_buffer("step", torch.full((1,), 7.0))
    tensors = {"w": tensor((4, 3)), "scale": tensor((3,)), "unrelated": tensor((2,))}
    needs = install(TorchGeneratorContext(module), tensors)
    assert {need.name for need in needs} == {"w", "scale"}
    assert torch.equal(module.w, tensors["w"])
    assert torch.equal(module.scale, tensors["scale"])
    assert module.rotary.tolist() == [7, 7]
    assert module.step.tolist() == [7]


def test_a_parameter_that_nobody_publishes_stays_needed() -> None:
    loader = (
        TorchGeneratorContext(Bag(w=tensor((4,)), x=tensor((2,))))
        .create_adapter()
        .loader(published({"w": tensor((4,))}))
    )
    assert [need.name for need in loader.needs] == ["w", "x"]


def test_frozen_names_are_left_alone() -> None:
    module = Bag(w=tensor((4,)), x=tensor((2,)))
    needs = install(TorchGeneratorContext(module, frozen=["x"]), {"w": tensor((4,))})
    assert [need.name for need in needs] == ["w"]
    with pytest.raises(UsageError, match="'y'"):
        TorchGeneratorContext(module, frozen=["y"]).create_adapter()


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_head_needs_one_of_its_names(name: str) -> None:
    module = torch.nn.Module()
    module.embed = torch.nn.Embedding(4, 2)
    module.head = torch.nn.Linear(2, 4, bias=False)
    module.head.weight = module.embed.weight
    tensors = {name: tensor((4, 2))}
    assert [need.name for need in install(TorchGeneratorContext(module), tensors)] == [name]
    assert torch.equal(module.embed.weight, tensors[name])
    slices = [
        TensorSlice("embed.weight", "embed.weight", (0, 0), (4, 2)),
        TensorSlice("head.weight", "head.weight", (0, 0), (4, 2)),
    ]
    needs = install(TorchGeneratorContext(module, slices=slices), tensors)
    assert [need.name for need in needs] == [name]


def test_a_head_of_its_own_takes_the_name_that_a_tied_trainer_publishes() -> None:
    module = Bag(embed=tensor((4, 2)), head=tensor((4, 2)))
    tensors = {"embed": tensor((4, 2))}
    needs = install(TorchGeneratorContext(module, aliases={"head": "embed"}), tensors)
    assert len(needs) == 1  # read once, copied twice
    assert torch.equal(module.head, tensors["embed"])


def test_fused_and_sharded_slices() -> None:
    """Rank 1 of 2: its rows of q, k and v stacked in one parameter, its columns of o in another."""
    tensors = {name: tensor((8, 4)) + i for i, name in enumerate("qkv")} | {"o": tensor((4, 8)) + 9}
    module = Bag(qkv=tensor((12, 4)), o=tensor((4, 4)))
    slices = [
        TensorSlice(name, "qkv", (4, 0), (4, 4), (4 * i, 0), hf_shape=(8, 4)) for i, name in enumerate("qkv")
    ] + [TensorSlice("o", "o", (0, 4), (4, 4))]
    install(TorchGeneratorContext(module, slices=slices), tensors)
    assert torch.equal(module.qkv, torch.cat([tensors[name][4:] for name in "qkv"]))
    assert torch.equal(module.o, tensors["o"][:, 4:])


def test_stacked_and_transposed_experts() -> None:
    tensors = {f"experts.{e}": tensor((3, 5)) + e for e in range(2)}
    module = Bag(w13=tensor((2, 5, 3)))
    slices = [
        TensorSlice(f"experts.{e}", "w13", (0, 0), (3, 5), (e, 0, 0), transposed=True) for e in range(2)
    ]
    install(TorchGeneratorContext(module, slices=slices), tensors)
    assert torch.equal(module.w13, torch.stack([tensors[f"experts.{e}"].T for e in range(2)]))


def test_floating_point_is_cast_in_the_copy() -> None:
    module = Bag(qk=tensor((4, 2), torch.bfloat16))
    tensors = {"q": tensor((2, 2)) + 0.001, "k": tensor((2, 2)) + 100.25}
    slices = [TensorSlice(name, "qk", (0, 0), (2, 2), (2 * i, 0)) for i, name in enumerate(tensors)]
    needs = install(TorchGeneratorContext(module, slices=slices), tensors)
    assert {need.dtype for need in needs} == {"torch.float32"}
    assert torch.equal(module.qk, torch.cat(list(tensors.values())).to(torch.bfloat16))


def test_another_kind_of_number_is_refused_by_name() -> None:
    adapter = TorchGeneratorContext(Bag(w=tensor((4,)))).create_adapter()
    with pytest.raises(GeometryError, match=r"'w'.*int8"):
        adapter.loader({"w": PublishedTensor("torch.int8", (4,))})
    with pytest.raises(GeometryError, match=r"'w'.*torch.float3"):
        adapter.loader({"w": PublishedTensor("torch.float3", (4,))})


def test_another_shape_is_refused_by_name() -> None:
    adapter = TorchGeneratorContext(Bag(w=tensor((4,)))).create_adapter()
    with pytest.raises(GeometryError, match=r"'w'.*\(8,\)"):
        adapter.loader({"w": PublishedTensor("torch.float32", (8,))})


@pytest.mark.parametrize(
    ("slices", "message"),
    [
        ([TensorSlice("a", "nothing", (0,), (4,))], r"'a'.*'nothing'"),
        ([TensorSlice("a", "w", (0,), (5,))], r"'a'.*\(5,\).*\(4,\)"),
        ([TensorSlice("a", "w", (0,), (3,), (2,))], r"'a'.*\(3,\) at \(2,\)"),
        ([TensorSlice("a", "w", (0,), (3,), (-1,))], r"'a'.*\(-1,\)"),
        ([TensorSlice("a", "w", (0, 0), (2, 2))], r"'a'.*\(2, 2\)"),
        ([TensorSlice("a", "w", (0,), (2, 2))], "differ in rank"),
        ([TensorSlice("a", "w", (0,), (4,), transposed=True)], "no two axes"),
        ([TensorSlice("a", "w", (0,), (3,))], "3 of 4 elements of parameter 'w'"),
        ([TensorSlice("a", "w", (0,), (3,)), TensorSlice("b", "w", (0,), (1,), (2,))], "two slices.*'w'"),
        ([], "0 of 4 elements of parameter 'w'"),
    ],
)
def test_slices_that_do_not_fit_are_refused(slices: list[TensorSlice], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        TorchGeneratorContext(Bag(w=tensor((4,))), slices=slices).create_adapter()


def test_a_module_that_changed_is_refused_before_anything_is_written() -> None:
    module = Bag(w=tensor((4,)), x=tensor((2,)))
    tensors = {"w": tensor((4,)) + 1, "x": tensor((2,)) + 1}
    loader = TorchGeneratorContext(module).create_adapter().loader(published(tensors))
    boxes = [staged(need, tensors) for need in loader.needs]
    module.x = torch.nn.Parameter(torch.zeros(2, dtype=torch.float64), requires_grad=False)
    with pytest.raises(StateError, match=r"'x'.*float64"):
        loader.check(boxes)
    del module.x
    with pytest.raises(StateError, match="'x' is gone"):
        loader.check(boxes)
    module.x = torch.nn.Parameter(torch.zeros(1).expand(2), requires_grad=False)
    with pytest.raises(StateError, match="share memory"):
        loader.check(boxes)
    module.x = torch.nn.Parameter(torch.zeros(2), requires_grad=False)
    with pytest.raises(StateError, match="not those"):
        loader.check(boxes[:1])
    assert module.w.tolist() == [0, 0, 0, 0]


def test_parameters_that_moved_between_versions_are_found_again() -> None:
    module = Bag(w=tensor((4,)))
    first, second = {"w": tensor((4,)) + 1}, {"w": tensor((4,)) + 2}
    loader = TorchGeneratorContext(module).create_adapter().loader(published(first))
    boxes = [staged(need, first) for need in loader.needs]
    loader.check(boxes)
    loader.install(boxes)
    old = module.w
    module.w = torch.nn.Parameter(torch.zeros(4), requires_grad=False)
    boxes[0].data[:] = staged(loader.needs[0], second).data
    loader.check(boxes)
    loader.install(boxes)
    assert torch.equal(module.w, second["w"])
    assert torch.equal(old, first["w"])


def test_an_install_must_be_checked_just_before() -> None:
    tensors = {"w": tensor((4,))}
    loader = TorchGeneratorContext(Bag(**tensors)).create_adapter().loader(published(tensors))
    with pytest.raises(StateError, match="not checked"):
        loader.install([])


def test_parameters_that_need_gradients_or_inference_mode_are_written() -> None:
    with torch.inference_mode():
        inference = Bag(w=tensor((4,)))
    trained = Bag(w=tensor((4,)))
    trained.w.requires_grad_(True)
    for module in (inference, trained):
        install(TorchGeneratorContext(module), {"w": tensor((4,))})
        assert torch.equal(module.w.detach(), tensor((4,)))


class Loads(Bag):
    """A module with a `load_weights` as vLLM's models have."""

    answer: Any = None

    def load_weights(self, named: Any) -> Any:
        for name, value in named:
            if name in ("w", "x"):
                self.get_parameter(name).copy_(value)
        return self.answer


def test_load_weights_gets_every_tensor_whole() -> None:
    module = Loads(w=tensor((4, 2)), x=tensor((3,)))
    module.answer = {"w", "x"}
    tensors = {"x": tensor((3,)), "w": tensor((4, 2)), "other": tensor((2,)), "empty": tensor((0, 3))}
    needs = install(TorchGeneratorContext(module, load_weights_whole=True), tensors)
    assert [need.name for need in needs] == ["empty", "other", "w", "x"]
    assert torch.equal(module.w, tensors["w"])


def test_load_weights_that_leaves_a_parameter_out_is_an_error() -> None:
    module = Loads(w=tensor((4, 2)), y=tensor((3,)))
    module.answer = {"w"}
    with pytest.raises(ModelExpressError, match="'y'"):
        install(TorchGeneratorContext(module, load_weights_whole=True), {"w": tensor((4, 2))})


def test_load_weights_that_keeps_the_staged_bytes_is_an_error() -> None:
    class Keeps(Bag):
        def load_weights(self, named: Any) -> None:
            for name, value in named:
                self.get_parameter(name).data = value

    with pytest.raises(ModelExpressError, match=r"'w'.*alias"):
        install(TorchGeneratorContext(Keeps(w=tensor((4,))), load_weights_whole=True), {"w": tensor((4,))})


def test_ways_that_exclude_each_other() -> None:
    with pytest.raises(UsageError, match="frozen"):
        TorchGeneratorContext(Loads(w=tensor((4,))), load_weights_whole=True, frozen=["w"])
    with pytest.raises(UsageError, match="is False"):
        TorchGeneratorContext(Loads(w=tensor((4,))), load_weights_whole=True, load_weights=False)
    with pytest.raises(UsageError, match="slices"):
        TorchGeneratorContext(Loads(w=tensor((4,))), load_weights=True, slices=[])
    with pytest.raises(UsageError, match="Bag has no method"):
        TorchGeneratorContext(Bag(w=tensor((4,))), load_weights=True)
