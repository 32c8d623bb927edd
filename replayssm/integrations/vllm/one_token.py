"""Prompts of one token beside drafts: vLLM fills them up with placeholder drafts, which its prefill reads as prompt.

The last token of a longer prompt goes with drafts as a window, whose end can be rejected. Here so does a prompt that is
nothing else, from an empty state. Runner V2.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from replayssm.integrations.vllm.prefix import group_of


@functools.cache
def verify_prompts_of_one_token() -> None:
    """Called by every replayed layer of a model with drafts; the first call of a process does the work."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    GPUModelRunner.gather_batch_req_state = _as_windows(GPUModelRunner.gather_batch_req_state)
    MambaHybridModelState.preprocess_state = _from_empty_states(MambaHybridModelState.preprocess_state)


def _as_windows(original: Any) -> Any:
    """Called once a step, to decide which rows of it are prefills."""

    @functools.wraps(original)
    def gather(runner: Any, scheduler_output: Any, dummy_run: bool) -> Any:
        batch, uniform = original(runner, scheduler_output, dummy_run)
        if batch is None or batch.num_draft_tokens_np is None or batch.prefill_runs_as_decode_np is None:
            return batch, uniform
        starting = batch.is_prefilling_np & (batch.num_computed_prefill_tokens_np == 0)
        windows = batch.prefill_runs_as_decode_np | (starting & (batch.num_draft_tokens_np > 0))
        return batch._replace(prefill_runs_as_decode_np=windows), uniform

    return gather


def _from_empty_states(original: Any) -> Any:
    """Called once a step, before its forward pass."""

    @functools.wraps(original)
    def preprocess(state: Any, batch: Any, block_tables: Any, kv_cache_config: Any, num_computed_tokens: Any) -> None:
        original(state, batch, block_tables, kv_cache_config, num_computed_tokens)
        windows = batch.prefill_runs_as_decode_np
        if windows is None:
            return
        rows = torch.from_numpy((windows & (batch.num_computed_prefill_tokens_np == 0)).nonzero()[0])
        if not len(rows):
            return
        layers = state.vllm_config.compilation_config.static_forward_context
        for index, kv_group in enumerate(kv_cache_config.kv_cache_groups):
            group = group_of(kv_group.layer_names, layers)
            if group is not None:
                table = block_tables[index]
                blocks = table[rows.to(table.device), 0].long()
                group.start(blocks)
                for name in kv_group.layer_names:
                    layers[name].kv_cache[0][blocks] = 0

    return preprocess
