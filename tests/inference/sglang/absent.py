"""Stands in for what sglang imports and a machine without a GPU can't have; import it before sglang.

Nothing of it is ever computed with: sglang's model classes, layers, loaders and process groups are its own.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

ABSENT = frozenset(
    [
        "cuda",
        "cutlass",
        "decord",
        "deep_gemm",
        "flash_attn",
        "flashinfer",
        "humming",
        "sgl_kernel",
        "tilelang",
        "torchaudio",
        "torchcodec",
        "torchvision",
        "tvm_ffi",
        "xgrammar",
    ]
)


class _Kind(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if cls.__name__.endswith("Mode"):  # enumerations are keys of dictionaries
            return f"{cls.__name__}.{name}"
        return _Kind(name, (_Nothing,), {})


class _Nothing(metaclass=_Kind):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def __get_pydantic_core_schema__(cls, *_: Any) -> Any:
        from pydantic_core import core_schema

        return core_schema.any_schema()

    def __or__(self, _: Any) -> int:
        return 0

    __ror__ = __or__

    def __int__(self) -> int:
        return 0

    def __call__(self, *arguments: Any, **_: Any) -> Any:
        return arguments[0] if arguments and callable(arguments[0]) else _Nothing()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Nothing()


class _Module(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Kind(name, (_Nothing,), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, *_: Any) -> importlib.machinery.ModuleSpec | None:
        if name.split(".")[0] not in ABSENT:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = _Module(spec.name)
        module.__path__ = []
        module.__version__ = "0.0"  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())
