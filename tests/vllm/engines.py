"""vLLM engines of tests: started small, asked with token ids, ended."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.vllm.prompts import BLOCK, PROMPTS, TOKENS


@contextlib.contextmanager
def engine(checkpoint: Path, backend: str | None = None, **options: Any) -> Iterator[Any]:
    """An `LLM` of the checkpoint, with our weight transfer where `backend` names it."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    if backend is not None:
        options["weight_transfer_config"] = WeightTransferConfig(backend=backend)
    llm = LLM(
        str(checkpoint),
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=256,
        max_num_seqs=8,
        block_size=BLOCK,
        **options,
    )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def greedy(llm: Any) -> list[list[int]]:
    """The tokens that the engine takes after each prompt."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], asked, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]
