"""Tensors whose memory does not hold their values are refused by name, by every engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from modelexpress_rl.errors import UsageError
from modelexpress_rl.train.engines.memory_of import require_plain_memory
from modelexpress_rl.train.engines.plain import PlainBox, PlainTrainerContext

torch = pytest.importorskip("torch")

COMPLEX = torch.view_as_complex(torch.arange(6.0).reshape(3, 2))
STRANGE = {
    "conjugated": (COMPLEX.conj(), r"marked as conjugated.*resolve_conj\(\)"),
    "negated": (torch._neg_view(torch.arange(6.0)), r"marked as negated.*resolve_neg\(\)"),
    "meta": (torch.zeros(3, device="meta"), "is on device 'meta', expected one of cpu, cuda"),
    "another machine's": (np.arange(5, dtype=">f4"), "byte order of another machine"),
}
PLAIN = {
    "resolved": COMPLEX.conj().resolve_conj(),
    "0-d": torch.tensor(1.0),
    "empty": torch.zeros(0, 3),
    "parameter": torch.nn.Parameter(torch.zeros(3)),
    "native": np.arange(5, dtype="=f4"),
    "bool": np.array([True]),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_the_plain_engine_refuses_it(kind: str) -> None:
    tensor, problem = STRANGE[kind]
    with pytest.raises(UsageError, match=f"^tensor 'odd': .*{problem}"):
        PlainTrainerContext().create_adapter().bind_tensors({"fine": torch.zeros(3), "odd": tensor})


@pytest.mark.parametrize("kind", PLAIN)
def test_it_takes_the_rest(kind: str) -> None:
    require_plain_memory("fine", PLAIN[kind])
    PlainTrainerContext().create_adapter().bind_tensors({"fine": PLAIN[kind]})


def test_a_wrapper_without_memory_is_refused() -> None:
    class Wrapper(torch.Tensor):  # type: ignore[misc]
        def data_ptr(self) -> int:
            return 0

    with pytest.raises(UsageError, match=r"^tensor 'odd': has no memory of its own \(Wrapper\)"):
        require_plain_memory("odd", torch.zeros(3).as_subclass(Wrapper))


@pytest.mark.parametrize("kind", ["conjugated", "negated", "meta"])
def test_the_megatron_engine_refuses_it(kind: str) -> None:
    from modelexpress_rl.train.engines.megatron import MegatronTensorSpec, MegatronTrainerContext

    tensor, problem = STRANGE[kind]
    spec = MegatronTensorSpec(
        name="decoder.final_layernorm.weight",
        tensor=tensor,
        role="replicated",
        hf_names=("model.norm.weight",),
        global_shape=tuple(tensor.shape),
        placement_kind="REPLICATE",
        shard_axis=None,
        local_shard_range=None,
        extras={},
    )
    with pytest.raises(UsageError, match=problem):
        MegatronTrainerContext(tensor_parallel_size=1, tensor_parallel_rank=0).create_adapter().bind_tensors(
            [spec]
        )


@pytest.mark.parametrize("field", ["full_shape", "offset"])
@pytest.mark.parametrize("numbers", [(4.0,), (4.5,), ("4",), 4])
def test_boxes_are_given_in_whole_numbers(field: str, numbers: Any) -> None:
    box = PlainBox("a", np.zeros(4), **{"full_shape": (4,), "offset": (0,), field: numbers})
    with pytest.raises(UsageError, match=f"tensor 'a': {field} must be whole numbers"):
        PlainTrainerContext().create_adapter().bind_tensors([box])


def test_what_is_no_collection_is_refused() -> None:
    with pytest.raises(UsageError, match="expected a mapping of names to tensors, or PlainBoxes, got int"):
        PlainTrainerContext().create_adapter().bind_tensors(5)  # type: ignore[arg-type]
