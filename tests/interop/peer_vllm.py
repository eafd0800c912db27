"""A stand-in for vLLM and for a GPU, as far as 0.7.0's generator asks for them on its way.

What it asks for was learned by running it: which modules it imports, which attributes it reads, what it
calls. The stand-in's engine is a plain module whose `load_weights` copies, as vLLM's models do.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch


class _Any:
    """Stands for a class that is imported and never used here."""


class ModelConfig:
    """The part of vLLM's that is read."""

    model = "m"
    dtype = torch.bfloat16
    quantization = None
    revision = None


class VllmConfig:
    """The part of vLLM's that is read."""

    def __init__(self) -> None:
        self.model_config = ModelConfig()
        self.load_config = types.SimpleNamespace(device="cpu")
        self.quant_config = None
        self.parallel_config = types.SimpleNamespace(
            rank=0,
            world_size=1,
            tensor_parallel_size=1,
            pipeline_parallel_size=1,
            data_parallel_size=1,
            data_parallel_rank=0,
            enable_expert_parallel=False,
        )


def default_weight_loader(param: torch.nn.Parameter, loaded: torch.Tensor) -> None:
    """Copy the whole tensor, as vLLM's does."""
    param.data.copy_(loaded)


def weight_loader_of(param: torch.nn.Parameter) -> Callable[..., None]:
    """A parameter's own loader, or the default one."""
    return getattr(param, "weight_loader", default_weight_loader)


def _nothing(*_: Any, **__: Any) -> None:
    return None


_LAYERWISE = {
    "LAYERWISE_INFO": {},
    "_get_original_loader": weight_loader_of,
    "_place_kernel_tensors": _nothing,
    "_copy_and_restore_kernel_tensors": _nothing,
    "initialize_layerwise_reload": _nothing,
    "finalize_layerwise_reload": _nothing,
}
MODULES: dict[str, dict[str, Any]] = {
    "vllm": {},
    "vllm.config": {
        "ModelConfig": ModelConfig,
        "VllmConfig": VllmConfig,
        "set_current_vllm_config": lambda *_, **__: contextlib.nullcontext(),
    },
    "vllm.config.load": {"LoadConfig": _Any},
    "vllm.model_executor": {},
    "vllm.model_executor.layers": {},
    "vllm.model_executor.layers.quantization": {},
    "vllm.model_executor.layers.quantization.base_config": {"QuantizeMethodBase": _Any},
    "vllm.model_executor.model_loader": {},
    "vllm.model_executor.model_loader.base_loader": {"BaseModelLoader": _Any},
    "vllm.model_executor.model_loader.default_loader": {"DefaultModelLoader": _Any},
    "vllm.model_executor.model_loader.reload": {},
    "vllm.model_executor.model_loader.reload.layerwise": _LAYERWISE,
    "vllm.model_executor.model_loader.utils": {"initialize_model": _nothing},
    "vllm.model_executor.model_loader.weight_utils": {"default_weight_loader": default_weight_loader},
    "vllm.platforms": {"current_platform": types.SimpleNamespace(current_device=lambda: 0)},
    "vllm.utils": {},
    "vllm.utils.torch_utils": {"set_default_torch_dtype": lambda *_: contextlib.nullcontext()},
}


class HostBackend:
    """0.7.0's accelerator boundary over host memory."""

    name = torch_device_type = "cpu"
    nixl_mem_type = "DRAM"

    def set_device(self, device_id: int) -> None: ...

    def current_device(self) -> int:
        return 0

    def synchronize(self, device_id: int | None = None) -> None: ...

    def empty_cache(self) -> None: ...

    def torch_device(self, device_id: int) -> torch.device:
        return torch.device("cpu")

    def is_accel_tensor(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == "cpu"

    def supports_rdma_p2p(self) -> bool:
        return True

    def supports_pool_reg(self) -> bool:
        return False

    def supports_vmm(self) -> bool:
        return False

    def supports_gds(self) -> bool:
        return False


def stand_in() -> None:
    """Must run before `modelexpress_rl` is imported."""
    for name, members in MODULES.items():
        module = types.ModuleType(name)
        module.__path__ = []
        for member, value in members.items():
            setattr(module, member, value)
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)
    torch.cuda.set_device = torch.cuda.synchronize = _nothing

    from modelexpress import accelerators

    accelerators.accelerator_backend_for = lambda device: HostBackend()

    from modelexpress.refit.reshard import cuda_pool

    cuda_pool.classic_cuda_alloc = contextlib.nullcontext

    from modelexpress.nixl_transfer import NixlTransferManager

    for name in ("post_read_batch", "execute_read_batch"):
        setattr(NixlTransferManager, name, _in_host_memory(getattr(NixlTransferManager, name)))


def _in_host_memory(read: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(read)
    def reading(*arguments: Any, **named: Any) -> Any:
        return read(*arguments, **{**named, "mem_type": "DRAM"})

    return reading


class Engine(torch.nn.Module):
    """What the stand-in's vLLM serves: gate and up are one parameter, as in a gated MLP."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        parameter = functools.partial(torch.zeros, dtype=torch.bfloat16)
        self.gate_up = torch.nn.Parameter(parameter(2 * rows, columns), requires_grad=False)
        self.down = torch.nn.Parameter(parameter(columns, rows), requires_grad=False)
        self.down_bias = torch.nn.Parameter(parameter(columns), requires_grad=False)
        self.norm = torch.nn.Parameter(parameter(columns), requires_grad=False)
        self.gate_up.weight_loader = self._load_half
        self._rows = rows

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        """Copy Hugging Face tensors into the parameters; answers which were loaded."""
        places = {
            "gate.weight": (self.gate_up, (0,)),
            "up.weight": (self.gate_up, (1,)),
            "down.weight": (self.down, ()),
            "down.bias": (self.down_bias, ()),
            "norm.weight": (self.norm, ()),
        }
        names = {id(parameter): name for name, parameter in self.named_parameters()}
        loaded = set()
        for name, tensor in weights:
            parameter, which = places[name]
            weight_loader_of(parameter)(parameter, tensor, *which)
            loaded.add(names[id(parameter)])
        return loaded

    def _load_half(self, param: torch.nn.Parameter, loaded: torch.Tensor, half: int) -> None:
        param.data.narrow(0, half * self._rows, self._rows).copy_(loaded)
