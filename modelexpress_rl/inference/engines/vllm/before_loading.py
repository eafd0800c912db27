"""A copy of a loaded model with its tensors as they were before loading: what `load_weights` was written for.

After loading, layers of vLLM hold packed, quantized or transposed tensors, or none: `load_weights` can't
write those. The copy shares everything with the live model that is no module, and none of its parameters.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from modelexpress_rl.inference.engines.torch.capture.twin import twin
from modelexpress_rl.inference.engines.vllm.host import Reload


@dataclass(frozen=True, slots=True, eq=False)
class BeforeLoading:
    """The copy, under which names its parameters are tied, and which of them a checkpoint need not have.

    Tied: the name that comes first, with all of them.
    """

    model: torch.nn.Module
    tied: dict[str, tuple[str, ...]]
    optional: frozenset[str]


def before_loading(model: torch.nn.Module, reload: Reload) -> BeforeLoading:
    """Make the copy; the live model is not touched."""
    copy = twin(model, lambda tensor: tensor)
    first: dict[int, str] = {}
    made: dict[str, torch.Tensor] = {}
    tied: dict[str, list[str]] = {}
    optional: set[str] = set()
    live = dict(model.named_modules())
    for path, layer in copy.named_modules():
        parameters, buffers = reload.before_loading(live[path])
        for held, restored in ((layer._parameters, parameters), (layer._buffers, buffers)):
            if held is layer._parameters:
                for leaf in [name for name in held if name not in restored and not reload.leaves(name)]:
                    del held[leaf]  # the processing after loading made it
            for leaf, tensor in restored.items():
                name = f"{path}.{leaf}" if path else leaf
                if reload.is_attention(live[path]):
                    optional.add(name)
                own = getattr(live[path], leaf, None)
                other = None if own is None or not own.numel() else first.setdefault(id(own), name)
                if other is not None and other != name and other in made:
                    held[leaf] = made[other]
                    tied.setdefault(other, [other]).append(name)
                    continue
                made[name] = held[leaf] = reload.bound_to(_like(tensor), layer)
    return BeforeLoading(copy, {name: tuple(names) for name, names in tied.items()}, frozenset(optional))


def _like(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor without memory, of the same class and attributes."""
    copy = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
    copy.__class__ = tensor.__class__
    copy.__dict__ = dict(tensor.__dict__)
    copy.requires_grad_(False)
    return copy
