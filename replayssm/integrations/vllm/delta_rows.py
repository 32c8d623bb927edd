"""Which rows and tokens of a step of vLLM's delta-rule layers go through the ring, and which its prefill serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from vllm.v1.attention.backends.utils import compute_causal_conv1d_metadata

from replayssm.integrations.vllm.group import Rows, continued_blocks, decode_step
from replayssm.plan import Plan

Part = slice | torch.Tensor


def delta_rows(plan: Plan, metadata: Any) -> Rows:
    """The rows of a step. Beside rows with drafts vLLM counts every other row as a prefill."""
    accepted = None
    if metadata.spec_sequence_masks is not None:
        n = metadata.num_spec_decodes
        starts = metadata.spec_query_start_loc[: n + 1]
        step = decode_step(plan, metadata.spec_state_indices_tensor[:n, 0], starts)
        accepted = metadata.num_accepted_tokens[:n]
    elif metadata.num_decodes:
        n = metadata.num_decodes if metadata.num_prefills else metadata.num_actual_tokens
        step = decode_step(plan, metadata.non_spec_state_indices_tensor[:n])
    else:
        step = None
    if metadata.num_prefills == 0:
        return Rows(step, accepted)
    blocks = metadata.prefill_state_indices
    return Rows(step, accepted, blocks, continued_blocks(blocks, metadata.prefill_has_initial_state))


def token_parts(metadata: Any) -> tuple[Part, Part]:
    """The tokens of decode rows and of prefill rows: one after the other, or listed where drafts are among them."""
    if metadata.spec_sequence_masks is not None and metadata.num_prefills:
        return metadata.spec_token_indx, metadata.non_spec_token_indx
    n = metadata.num_decode_tokens if metadata.num_prefills else metadata.num_actual_tokens
    return slice(0, n), slice(n, None)


def run_part(part: Part, inputs: tuple[torch.Tensor, ...], out: torch.Tensor, run: Callable[..., None]) -> None:
    """`run(*inputs, out)` on a part of the tokens."""
    if isinstance(part, slice):
        run(*(x[part] for x in inputs), out[part])
        return
    result = out.new_zeros(len(part), *out.shape[1:])
    run(*(x.index_select(0, part) for x in inputs), result)
    out.index_copy_(0, part.long(), result)


def only_prefills(metadata: Any) -> Any:
    """The metadata of a mixed batch as if it held its prefill rows alone."""
    alone = replace(
        metadata,
        num_decodes=0,
        num_decode_tokens=0,
        num_spec_decodes=0,
        num_spec_decode_tokens=0,
        num_actual_tokens=metadata.num_prefill_tokens,
        has_initial_state=metadata.prefill_has_initial_state,
        non_spec_query_start_loc=metadata.prefill_query_start_loc,
        non_spec_state_indices_tensor=metadata.prefill_state_indices,
        spec_sequence_masks=None,
        num_accepted_tokens=None,
    )
    n = metadata.num_decodes
    if n == 0:
        return alone
    # vLLM's convolution wants the chunks of its rows listed: a decode row is one chunk, and they come first.
    ((chunk, listed),) = metadata.nums_dict.items()
    starts = torch.nn.functional.pad((listed["nums"][n:] * chunk).cumsum(0), (1, 0))
    nums_dict, batch_ptr, offsets = compute_causal_conv1d_metadata(starts, device=metadata.batch_ptr.device)
    return replace(alone, nums_dict=nums_dict, batch_ptr=batch_ptr, token_chunk_offset_ptr=offsets)
