"""Gated DeltaNet on vLLM's CPU platform, which serves the tests: there the layer's core is a function of a module."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

from replayssm.cursors import Step
from replayssm.integrations.vllm.group import Rows, continued_blocks, decode_step


def route_cpu() -> None:
    """Send layers with a ring through it, once a process."""
    original = gdn_attention._cpu_gdn_attention_nonspec
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def routed(
        layer: Any,
        metadata: Any,
        mixed_qkv: torch.Tensor,
        b: torch.Tensor,
        a: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        inputs = (mixed_qkv, b, a, core_attn_out)
        if getattr(layer, "group", None) is None:
            original(layer, metadata, *inputs)
            return
        rows = layer.group.begin(layer.prefix, lambda: _rows(layer, metadata))
        n = 0 if rows.decodes is None else rows.decodes.num_tokens
        if rows.decodes is not None:
            qkv = _convolve(layer, rows.decodes, mixed_qkv[:n].contiguous())
            layer.decode(rows.decodes, qkv, b[:n], a[:n], core_attn_out[:n])
        if rows.prefills is not None:
            layer.before_prefill(rows)
            _transpose(layer.kv_cache[1], rows.prefills)
            original(layer, _only_prefills(metadata), *(x[n:] for x in inputs))
            _transpose(layer.kv_cache[1], rows.prefills)
            layer.after_prefill(rows)
        layer.group.end(layer.prefix)

    gdn_attention._cpu_gdn_attention_nonspec = routed


def _rows(layer: Any, metadata: Any) -> Rows:
    blocks, n = metadata.non_spec_state_indices_tensor, metadata.num_decodes
    step, end = decode_step(layer.plan, blocks[:n]), n + metadata.num_prefills
    if end == n:
        return Rows(step)
    prefills = blocks[n:end]
    return Rows(step, None, prefills, continued_blocks(prefills, metadata.has_initial_state[n:end]))


def _transpose(state: torch.Tensor, blocks: torch.Tensor) -> None:
    """vLLM's CPU kernels keep a state as [K, V] in the memory that its GPU kernels and ours see as [V, K]."""
    index = blocks.long()
    rows = state[index]
    state[index] = rows.transpose(-1, -2).reshape(rows.shape)


def _convolve(layer: Any, step: Step, mixed_qkv: torch.Tensor) -> torch.Tensor:
    """The convolution of one token a row, by the function that the layer's weights were packed for."""
    conv = layer.kv_cache[0] if is_conv_state_dim_first() else layer.kv_cache[0].transpose(-1, -2)
    weight, common = layer.conv1d.weight, {"bias": layer.conv1d.bias, "conv_state_indices": step.slot_indices}
    if torch.cpu._is_avx512_bf16_supported() or gdn_attention.is_arm_bf16():
        return gdn_attention._causal_conv1d_update_cpu(
            x=mixed_qkv,
            conv_states=conv,
            weight=weight,
            silu_activation=layer.activation == "silu",
            is_weight_packed=True,
            **common,
        )
    return gdn_attention.causal_conv1d_update_cpu(
        x=mixed_qkv,
        conv_state=conv,
        weight=weight.view(weight.size(0), weight.size(2)),
        activation=layer.activation,
        **common,
    )


def _only_prefills(metadata: Any) -> Any:
    """The metadata of a mixed batch as if it held its prefill rows alone."""
    n = metadata.num_decodes
    return replace(
        metadata,
        num_decodes=0,
        num_decode_tokens=0,
        num_actual_tokens=metadata.num_prefill_tokens,
        has_initial_state=metadata.has_initial_state[n:],
        non_spec_query_start_loc=metadata.non_spec_query_start_loc[n:] - metadata.num_decode_tokens,
        non_spec_state_indices_tensor=metadata.non_spec_state_indices_tensor[n:],
    )
