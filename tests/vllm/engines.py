"""vLLM engines of tests: started small, asked with token ids, ended."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

from tests.vllm.prompts import BLOCK, PROMPTS, TOKENS


@contextlib.contextmanager
def engine(checkpoint: Path, backend: str | None = None, ranks: int = 1, **options: Any) -> Iterator[Any]:
    """An `LLM` of the checkpoint, with our weight transfer where `backend` names it.

    Its engine core, and with one rank its worker, live in this process, which spares them their imports.
    """
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    if backend is not None:
        options["weight_transfer_config"] = WeightTransferConfig(backend=backend)
    with patch.dict(os.environ, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}):
        llm = LLM(
            str(checkpoint),
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=256,
            max_num_seqs=8,
            block_size=BLOCK,
            tensor_parallel_size=ranks,
            distributed_executor_backend="uni" if ranks == 1 else "mp",
            **options,
        )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def greedy(llm: Any) -> list[list[int]]:
    """The tokens that the engine takes after each prompt, asked one after the other, as a server is."""
    return [greedy_after(llm, prompt, TOKENS) for prompt in PROMPTS]


def greedy_after(llm: Any, prompt: list[int], count: int) -> list[int]:
    """So many tokens after this prompt."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
    (output,) = llm.generate([{"prompt_token_ids": prompt}], asked, use_tqdm=False)
    return list(output.outputs[0].token_ids)


def fresh(checkpoint: Path, ranks: int = 1, **options: Any) -> list[list[int]]:
    """What an engine answers that was started from this checkpoint."""
    with engine(checkpoint, ranks=ranks, **options) as llm:
        return greedy(llm)


def worker_of(llm: Any) -> Any:
    """The worker of an engine of one rank."""
    return llm.llm_engine.model_executor.driver_worker.worker


def model_of(llm: Any) -> Any:
    """Its model."""
    return worker_of(llm).get_model()


def addresses(llm: Any) -> dict[str, int]:
    """Where its parameters and buffers lie."""
    model = model_of(llm)
    return {name: tensor.data_ptr() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


def update(llm: Any, version_id: str) -> None:
    """Refit the engine as vLLM's protocol has it."""
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version_id": version_id}})
    llm.finish_weight_update(version_id)
    assert llm.get_weight_version() == version_id
