"""vLLM's metadata of a step, by the builder of a layer's own backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.kv_cache_interface import MambaSpec

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}


def step_metadata(
    builder_class: Any, folder: Path, drafts: bool, done: list[int], prompts: list[int], lens: list[int]
) -> Any:
    """Done tokens, prompt length and tokens of every request; blocks are 11, 12, ..."""
    extra: dict[str, Any] = {"speculative_config": DRAFTS} if drafts else {}
    common = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "enforce_eager": True}
    config = EngineArgs(str(folder), max_model_len=256, **common, **extra).create_engine_config()
    spec = MambaSpec(block_size=256, shapes=((3, 8), (4, 6, 8)), dtypes=(torch.bfloat16, torch.float32))
    builder = builder_class(spec, ["a"], config, torch.device("cpu"))
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    totals = torch.tensor(done) + torch.tensor(lens)
    prefilling = torch.tensor(done) < torch.tensor(prompts)
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=totals.int(),
        num_reqs=len(lens),
        num_actual_tokens=sum(lens),
        max_query_len=max(lens),
        max_seq_len=int(totals.max()),
        block_table_tensor=torch.arange(11, 11 + len(lens)).int()[:, None],
        slot_mapping=torch.zeros(sum(lens), dtype=torch.int64),
        is_prefilling=prefilling,
        seq_lens_cpu_upper_bound=totals.int(),
    )
    if not drafts:
        return builder.build(0, batch)
    accepted = torch.arange(1, len(lens) + 1).int()
    draft_counts = torch.where(prefilling, -1, torch.tensor(lens) - 1).int()
    return builder.build(0, batch, accepted, draft_counts)
