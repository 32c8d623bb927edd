"""Prefix caching: a block that vLLM has filled holds the plain state at its end, with an empty ring.

vLLM (`mamba_cache_mode` align) copies a request's state to its next block whenever the tokens of a block are complete,
and to its first block when it starts from a cached prefix. Before such a copy the ring of the source is replayed into
its state, which the copy and every later reader of the cached block then find; the copy's own ring starts empty.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

import torch

from replayssm.integrations.vllm.group import Group


def follow_copies() -> None:
    """Called when a group is formed; the first call of a process does the work."""
    from vllm.v1.worker import mamba_utils
    from vllm.v1.worker.gpu.model_states.mamba_hybrid import MambaHybridModelState

    if not hasattr(mamba_utils.collect_mamba_copy_meta, "__wrapped__"):
        mamba_utils.collect_mamba_copy_meta = _before_collected(mamba_utils.collect_mamba_copy_meta)
        MambaHybridModelState.preprocess_state = _around_preprocess(MambaHybridModelState.preprocess_state)


def group_of(layer_names: Iterable[str], layers: dict[str, Any]) -> Group | None:
    """The replayed group of a KV-cache group's layers."""
    return next((group for name in layer_names if (group := getattr(layers[name], "group", None)) is not None), None)


def _before_collected(original: Any) -> Any:
    """Runner V1: called for every request that moves to another block, before the copies of a step run."""

    @functools.wraps(original)
    def collect(
        copy_bufs: Any,
        kv_cache_config: Any,
        copy_funcs: Any,
        group_ids: list[int],
        src_column: int,
        dst_column: int,
        token_bias: int,
        request: Any,
        layers: dict[str, Any],
    ) -> None:
        for index in group_ids:
            group = group_of(kv_cache_config.kv_cache_groups[index].layer_names, layers)
            if group is not None and src_column != dst_column:
                table = request.block_ids[index]
                blocks = torch.tensor([[table[src_column]], [table[dst_column]]], device=group.cursors.device)
                group.settle(blocks[0])
                group.copied(blocks[0], blocks[1])
        original(
            *(copy_bufs, kv_cache_config, copy_funcs, group_ids, src_column, dst_column, token_bias, request, layers)
        )

    return collect


def _around_preprocess(original: Any) -> Any:
    """Runner V2: called once a step, before its forward pass."""

    @functools.wraps(original)
    def preprocess(state: Any, batch: Any, block_tables: Any, kv_cache_config: Any, num_computed_tokens: Any) -> None:
        moves = _moves(state, batch, block_tables, kv_cache_config) if state._align_mode else []
        for group, src, _ in moves:
            group.settle(src)
        original(state, batch, block_tables, kv_cache_config, num_computed_tokens)
        for group, src, dst in moves:
            group.copied(src, dst)

    return preprocess


def _moves(
    state: Any, batch: Any, block_tables: Any, kv_cache_config: Any
) -> list[tuple[Group, torch.Tensor, torch.Tensor]]:
    """(group, source blocks [n], destination blocks [n]) of this step; without drafts the host knows the rows."""
    size, done = state.cache_config.mamba_block_size, batch.num_computed_tokens_np[: batch.num_reqs]
    columns = (done - 1) // size, (done + batch.num_scheduled_tokens[: batch.num_reqs] - 1) // size
    rows = ((done > 0) & (columns[0] != columns[1])).nonzero()[0]
    if not len(rows):
        return []
    layers = state.vllm_config.compilation_config.static_forward_context
    found = []
    for index, kv_group in enumerate(kv_cache_config.kv_cache_groups):
        group = group_of(kv_group.layer_names, layers)
        if group is not None:
            device = group.cursors.device
            at = torch.from_numpy(rows).to(device)
            src, dst = (block_tables[index][at, torch.from_numpy(c[rows]).to(device).long()].long() for c in columns)
            found.append((group, src, dst))
    return found
