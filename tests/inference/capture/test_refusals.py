"""What a capture refuses, by tensor and operation, with what to do; nothing live changes on the way."""

from __future__ import annotations

import contextlib
import re
from typing import Any

import pytest
import torch

from modelexpress_rl.errors import (
    GeometryError,
    IncompleteVersionError,
    ModelExpressError,
    StateError,
    UsageError,
)
from modelexpress_rl.inference.engines.torch import TorchGeneratorContext
from modelexpress_rl.inference.engines.torch.capture import CaptureRefused, capture
from tests.inference.capture.support import (
    Loads,
    captured,
    numbered,
    parameter,
    published,
    staged,
    state,
)

ELSEWHERE = torch.zeros(4, 6)


def _sets(name: str) -> Any:
    return lambda self, w: setattr(self, name, w.clone())


@pytest.mark.parametrize(
    ("load", "message"),
    [
        (lambda self, w: self.p.copy_(w * 2), "'p' gets the result of aten.mul.Tensor on tensor 'w'"),
        (lambda self, w: self.p.data.copy_((w + w.t().t())[:4]), "aten.add.Tensor on tensor 'w'"),
        (lambda self, w: self.p.copy_(w.float().contiguous().neg()), "aten.neg.default on tensor 'w'"),
        (lambda self, w: self.p.copy_(w.flip(0)), "aten.flip.default on tensor 'w'"),
        (lambda self, w: self.p.copy_(w[torch.eye(4, dtype=torch.long)][0]), "aten.index.Tensor on"),
        (lambda self, w: self.p.copy_(torch.empty_like(w)), "aten.empty_like.default on tensor 'w'"),
        (lambda self, w: w[0, 0].item(), "aten._local_scalar_dense.default reads values of tensor 'w'"),
        (lambda self, w: 1 if w.sum() > 0 else 2, "reads values of what was made of tensor 'w'"),
        (lambda self, w: w.clone().tolist(), "Tensor.tolist reads values of what was made of tensor 'w'"),
        (lambda self, w: w.numpy(), "Tensor.numpy reads values of tensor 'w'"),
        (lambda self, w: w.data_ptr(), "Tensor.data_ptr reads values of tensor 'w'"),
        (lambda self, w: torch.equal(w, w), "aten.equal.default reads values of tensor 'w'"),
        (lambda self, w: self.p.copy_(w[w > 3]), "aten.index.Tensor on tensor 'w' depends on its values"),
        (lambda self, w: w.to(torch.complex64).conj(), "aten._conj.default on what was made of tensor 'w'"),
        (lambda self, w: w[torch.arange(4) > 1], "aten.index.Tensor on tensor 'w' depends on"),
        (lambda self, w: w.nonzero(), "aten.nonzero.default on tensor 'w' depends on its values"),
        (lambda self, w: float(self.p[0, 0]), "reads values of parameter 'p'"),
        (lambda self, w: self.p.data.mul_(2), "aten.mul_.Tensor changes parameter 'p'"),
        (lambda self, w: self.p.data.normal_(), "aten.normal_.default changes parameter 'p'"),
        (lambda self, w: self.p.__setitem__(torch.tensor([0, 1]), w[:2]), "aten.index_put_.default changes"),
        (lambda self, w: w.mul_(2), "aten.mul_.Tensor changes tensor 'w'"),
        (lambda self, w: w.zero_(), "tensor 'w' is overwritten"),
        (lambda self, w: torch.zeros(4, 6).t().clone().copy_(w.t()), "written to a strided tensor"),
        (lambda self, w: self.p.copy_(self.q), "parameter 'p' gets a copy of parameter 'q'"),
        (lambda self, w: ELSEWHERE.copy_(w), "aten.copy_.default writes to a tensor that is not of"),
        (lambda self, w: ELSEWHERE[0].zero_(), "aten.zero_.default writes to a tensor that is not"),
        (lambda self, w: self.p.copy_(w.view(torch.uint8)[:, :6]), "published as torch.float32, is viewed"),
        (lambda self, w: self.plain.copy_(w), "a tensor of shape .4, 6. of the module' is written"),
        (lambda self, w: setattr(self.p, "data", w[:2]), r"parameter 'p', torch.float32 \(4, 6\), is made"),
        (lambda self, w: setattr(self, "p", torch.nn.Parameter(w)), "it replaces the tensor 'p'"),
        (_sets("cached"), "it sets the tensor 'cached'"),
        (_sets("plain"), "it replaces the tensor 'plain'"),
        (lambda self, w: delattr(self, "q"), "it removes the tensor 'q'"),
        (lambda self, w: self.p.data.set_(w), "aten.set_.source_Tensor changes parameter 'p'"),
        (lambda self, w: self.read_then_written(), "'order' is read and then written"),
        (lambda self, w: self.written_then_read(), "'order', which load_weights itself has written"),
        (lambda self, w: self.swallows(w), "aten.mul.Tensor on tensor 'w'"),
    ],
)  # fmt: skip
def test_what_no_copy_expresses_is_refused(load: Any, message: str) -> None:
    class Model(Loads):
        def __init__(self) -> None:
            super().__init__(lambda self, named: load(self, named["w"]), p=parameter(4, 6), q=parameter(4, 6))
            self.plain = torch.zeros(4, 6)
            self.register_buffer("order", torch.tensor([1, 0]))

        def read_then_written(self) -> None:
            if self.order[0] == 1:
                self.order[0] = 0

        def written_then_read(self) -> None:
            self.order[0] = 0
            self.order.tolist()

        def swallows(self, w: torch.Tensor) -> None:
            with contextlib.suppress(Exception):
                self.p.copy_(w * 2)

    module, tensors = Model(), numbered(w=(4, 6))
    before = state(module)
    with pytest.raises(CaptureRefused, match=message) as refused:
        capture(module, published(tensors))
    assert "slices=" in str(refused.value)
    assert "load_weights_whole=True" in str(refused.value)
    assert state(module) == before
    assert not ELSEWHERE.any()


def test_results_that_go_nowhere_are_no_matter() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        largest = named["w"].abs().max()
        self.p.data.copy_(named["w"])
        str(largest.shape)

    captured(Loads(load, p=parameter(4)), numbered(w=(4,)))


@pytest.mark.parametrize(
    ("load", "frozen", "message"),
    [
        (
            lambda self, named: self.p.data[:3].copy_(named["w"][:3]),
            (),
            "leaves 6 of 24 elements of parameter",
        ),
        (lambda self, named: self.p.data[:, ::2].copy_(named["w"][:, ::2]), (), "leaves 12 of 24 elements"),
        (
            lambda self, named: None,
            (),
            r"leaves 24 of 24 .* 'p' .*not taken: 'w'.*`frozen`",
        ),
    ],
)
def test_a_parameter_that_would_stay_unfilled(load: Any, frozen: Any, message: str) -> None:
    module = Loads(load, p=parameter(4, 6))
    with pytest.raises(IncompleteVersionError, match=message):
        capture(module, published(numbered(w=(4, 6))))
    capture(module, published(numbered(w=(4, 6))), frozen=["p"])


def test_a_parameter_that_was_not_said_to_be_loaded() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> set[str]:
        self.p.data.copy_(named["p"])
        self.q.data.copy_(named["p"])
        return {"p", "something else"}

    module = Loads(load, p=parameter(4), q=parameter(4))
    with pytest.raises(ModelExpressError, match="loaded 1 parameters, but not 'q'"):
        capture(module, published(numbered(p=(4,))))
    capture(module, published(numbered(p=(4,))), frozen=["q"])
    with pytest.raises(UsageError, match=r"frozen.*'r'"):
        capture(module, published(numbered(p=(4,))), frozen=["r", "q"])


def test_a_frozen_parameter_is_left_as_it_is_though_it_would_be_loaded() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.p.data.copy_(named["p"])
        self.q.data.copy_(named["q"])

    found = captured(Loads(load, p=parameter(4), q=parameter(4)), numbered(p=(4,), q=(4,)), frozen=["q"])
    assert [need.name for need in found.needs] == [copy.target.name for copy in found.copies] == ["p"]


def test_an_error_of_the_loader_names_the_tensor() -> None:
    module = Loads(lambda self, named: None, p=parameter(4))
    module._load = lambda self, named: self.p.data.copy_(named["w"])
    with pytest.raises(GeometryError, match="failed at tensor 'w': RuntimeError"):
        capture(module, published(numbered(w=(5,))))
    module.load_weights = lambda path, strict: None  # type: ignore[method-assign, assignment, misc]
    with pytest.raises(GeometryError, match=r"before it took a tensor .load_weights=False"):
        capture(module, published(numbered(w=(5,))))
    del module.load_weights
    module._load = lambda self, named: named["nothing"]
    with pytest.raises(GeometryError, match="KeyError: 'nothing'"):
        capture(module, published(numbered(w=(4,))))


def test_another_kind_of_number_is_refused_but_not_an_explicit_cast() -> None:
    tensors = {"w": torch.arange(4, dtype=torch.int32)}
    module = Loads(lambda self, named: self.p.data.copy_(named["w"]), p=parameter(4))
    with pytest.raises(GeometryError, match=r"'w'.*int32.*'p'"):
        capture(module, published(tensors))
    module = Loads(lambda self, named: self.p.data.copy_(named["w"].float()), p=parameter(4))
    assert len(captured(module, tensors).copies) == 1


def test_parameters_that_are_no_ordinary_tensors_are_refused() -> None:
    class Wrapped(torch.Tensor):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return wrapped  # detached

    wrapped = torch.Tensor._make_wrapper_subclass(Wrapped, (4,))  # type: ignore[attr-defined]
    module = Loads(lambda self, named: None, p=torch.nn.Parameter(wrapped, requires_grad=False))
    with pytest.raises(CaptureRefused, match="parameter 'p' is a Wrapped"):
        capture(module, {})
    lazy = Loads(lambda self, named: None, p=torch.nn.UninitializedParameter())
    with pytest.raises(CaptureRefused, match="parameter 'p' is a Uninit"):
        capture(lazy, {})


LIVE: list[torch.nn.Module] = []


def test_a_loader_that_marks_a_live_parameter_by_a_global_is_found_out() -> None:
    def load(self: Any, named: dict[str, torch.Tensor]) -> None:
        self.p.data.copy_(named["w"])
        LIVE[0].p.mark = 1  # type: ignore[union-attr]

    LIVE[:] = [Loads(load, p=parameter(4))]
    with pytest.raises(StateError, match="changed the live module"):
        capture(LIVE[0], published(numbered(w=(4,))))
    LIVE.clear()


def test_a_module_that_changed_is_refused_before_anything_is_written() -> None:
    tensors = numbered(w=(4, 6))
    module = Loads(lambda self, named: self.p.data.copy_(named["w"]), p=parameter(4, 6))
    loader = TorchGeneratorContext(module).create_adapter().loader(published(tensors))
    boxes = [staged(need, tensors) for need in loader.needs]
    module.p = torch.nn.Parameter(torch.zeros(6, 4).t(), requires_grad=False)
    with pytest.raises(StateError, match=re.escape("had strides (6, 1)")):
        loader.check(boxes)
    module.p = parameter(4, 6)
    with pytest.raises(StateError, match="not those"):
        loader.check([])
    with pytest.raises(StateError, match="not checked"):
        loader.install(boxes)
    loader.check(boxes)
    loader.install(boxes)
    assert torch.equal(module.p, tensors["w"])
