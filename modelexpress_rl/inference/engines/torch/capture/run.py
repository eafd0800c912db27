"""Running a module's `load_weights` once, on a twin that has no memory."""

from __future__ import annotations

import inspect
import logging
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch

from modelexpress_rl.errors import GeometryError, ModelExpressError, StateError
from modelexpress_rl.inference.adapter import PublishedTensor
from modelexpress_rl.inference.engines.torch.capture.captured import Captured, assembled
from modelexpress_rl.inference.engines.torch.capture.errors import refused
from modelexpress_rl.inference.engines.torch.capture.landing import landings, require_filled
from modelexpress_rl.inference.engines.torch.capture.modes import DispatchMode, FunctionMode
from modelexpress_rl.inference.engines.torch.capture.recorder import Recorder, key_of
from modelexpress_rl.inference.engines.torch.capture.threads import no_work_elsewhere
from modelexpress_rl.inference.engines.torch.capture.twin import twin
from modelexpress_rl.inference.engines.torch.dtypes import torch_dtype

_log = logging.getLogger(__name__)

Load = Callable[[Any, Iterator[tuple[str, torch.Tensor]]], Any]
Attributes = dict[tuple[str, str], torch.Tensor]


def capture(
    module: torch.nn.Module,
    published: Mapping[str, PublishedTensor],
    *,
    load: Load | None = None,
    frozen: Collection[str] = (),
    optional: Collection[str] = (),
    aliases: Mapping[str, str] | None = None,
) -> Captured:
    """Find out what `module.load_weights` does with tensors of these names, dtypes and shapes.

    `load(module, weights)`, where given, is asked instead. It runs once, on a twin of the module: nothing
    that it does reaches the module itself. It gets the published tensors in the order of their names, and
    those of `aliases` under both of theirs. Every parameter must be filled whole, but those in `frozen`,
    which are left as they are, and those in `optional`, which may be.

    Raises:
        CaptureRefused: it does something that no copy expresses; the message names tensor and operation.
        GeometryError: it raises an error itself, such as for a shape that does not fit.
        UsageError: `frozen` names what the module does not have.
        IncompleteVersionError: it leaves elements of a parameter as they are.
        StateError: it changed the live module, past everything that keeps it off.
    """
    began = time.perf_counter()
    recorder = Recorder()
    copy = twin(module, _Stands(recorder, module))
    before, live_before = _tensor_attributes(copy), _state(module)
    loaded = _load(load or load_weights, copy, published, aliases or {}, recorder)
    _require_same(before, _tensor_attributes(copy))
    if _state(module) != live_before:
        raise StateError(f"load_weights of {type(module).__name__} changed the live module in a capture")
    found = landings(module, recorder.writes, frozen)
    require_filled(module, found, loaded, frozenset(frozen) | frozenset(optional), published)
    captured = assembled(found, {name: tensor.dtype for name, tensor in published.items()})
    _report(module, captured, time.perf_counter() - began)
    return captured


class _Stands:
    """Makes the tensors of a twin."""

    def __init__(self, recorder: Recorder, module: torch.nn.Module) -> None:
        self._recorder = recorder
        self._names: dict[int, str] = {}
        for name, tensor in module.named_parameters(remove_duplicate=False):
            if not _is_usual(tensor):
                raise refused(f"parameter {name!r} is a {type(tensor).__name__}, not an ordinary tensor")
            self._names.setdefault(id(tensor), name)
            recorder.stand_in(tensor, name, is_parameter=True)
        for name, buffer in module.named_buffers(remove_duplicate=False):
            self._names.setdefault(id(buffer), name)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        if not _is_usual(tensor):
            return tensor
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        name = self._names.get(id(tensor), f"a tensor of shape {tuple(tensor.shape)} of the module")
        stand_in = self._recorder.stand_in(tensor, name, is_parameter=is_parameter)
        if type(tensor) is torch.Tensor:
            return stand_in
        return torch.Tensor._make_subclass(type(tensor), stand_in, tensor.requires_grad)


def _is_usual(tensor: torch.Tensor) -> bool:
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return False
    return not torch.nn.parameter.is_lazy(tensor) and key_of(tensor) is not None


def _load(
    load: Load,
    copy: torch.nn.Module,
    published: Mapping[str, PublishedTensor],
    aliases: Mapping[str, str],
    recorder: Recorder,
) -> Any:
    names = {name: name for name in published}
    names |= {alias: name for alias, name in aliases.items() if name in published and alias not in published}
    given: list[str] = []

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        for name in sorted(names):
            tensor = published[names[name]]
            given.append(name)
            dtype = torch_dtype(tensor.dtype, tensor=name)
            yield name, recorder.publish(names[name], tensor.shape, dtype)

    try:
        with torch.no_grad(), no_work_elsewhere(recorder), FunctionMode(recorder), DispatchMode(recorder):
            loaded = load(copy, weights())
    except ModelExpressError:
        if recorder.refusal is not None:
            raise recorder.refusal from None
        raise
    except Exception as error:
        if recorder.refusal is not None:
            raise recorder.refusal from error
        at = "before it took a tensor (load_weights=False installs by the parameters' names)"
        if given:
            at = f"at tensor {given[-1]!r}"
        raise GeometryError(
            f"load_weights of {type(copy).__name__}, run on tensors without memory, failed {at}: "
            f"{type(error).__name__}: {error}"
        ) from error
    if recorder.refusal is not None:
        raise recorder.refusal
    return loaded


def load_weights(module: torch.nn.Module, weights: Iterator[tuple[str, torch.Tensor]]) -> Any:
    """Call the module's own `load_weights`, by position or, where it takes nothing so, by keyword.

    What it yields is collected.
    """
    function: Callable[..., Any] = module.load_weights  # type: ignore[assignment]
    parameters = list(inspect.signature(function).parameters.values())
    if parameters and parameters[0].kind is inspect.Parameter.KEYWORD_ONLY:
        loaded = function(**{parameters[0].name: weights})
    else:
        loaded = function(weights)
    return list(loaded) if isinstance(loaded, Iterator) else loaded


def _tensor_attributes(module: torch.nn.Module) -> Attributes:
    """Every tensor that is an attribute of a module, by the module's path and the attribute's name."""
    found: Attributes = {}
    for path, each in module.named_modules():
        for held in (vars(each), each._parameters, each._buffers):
            found.update(
                {(path, key): value for key, value in held.items() if isinstance(value, torch.Tensor)}
            )
    return found


def _require_same(before: Attributes, after: Attributes) -> None:
    for path, attribute in [*after, *before]:
        name = f"{path}.{attribute}" if path else attribute
        old, new = before.get((path, attribute)), after.get((path, attribute))
        if old is not new:
            done = "removes" if new is None else "sets" if old is None else "replaces"
            raise refused(f"it {done} the tensor {name!r} instead of writing into it")


def _state(module: torch.nn.Module) -> list[Any]:
    """What must not change in the live module, though its engine may be at work: parameters as they lie."""
    return [
        (name, id(tensor), key_of(tensor), tensor.dtype, tensor.shape, tensor.stride(), list(vars(tensor)))
        for name, tensor in module.named_parameters(remove_duplicate=False)
    ]


def _report(module: torch.nn.Module, captured: Captured, took_s: float) -> None:
    _log.info(
        "load_weights of %s, captured in %.3f s: %d boxes to read, %d copies",
        type(module).__name__,
        took_s,
        len(captured.needs),
        len(captured.copies),
    )
    for each in captured.widened:
        _log.info(
            "tensor %r: offset %s shape %s is read although %d of its elements are not used: "
            "what load_weights takes of it is no box",
            each.name,
            each.offset,
            each.shape,
            each.unused,
        )
