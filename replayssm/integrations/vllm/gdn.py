"""Gated DeltaNet of Qwen3-Next and Qwen3.5: decode rows through the ring, prefill rows by vLLM."""

from __future__ import annotations

import functools
from typing import Any

import torch
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

from replayssm.config import GDNSpec
from replayssm.cursors import Step
from replayssm.integrations.vllm.conv import convolve
from replayssm.integrations.vllm.gdn_rows import gdn_rows, only_prefills, run_part, token_parts
from replayssm.integrations.vllm.group import Rows
from replayssm.integrations.vllm.layer import ReplayLayer
from replayssm.step import delta_decode


class ReplayGatedDeltaNet(ReplayLayer, QwenGatedDeltaNetAttention):
    """vLLM's layer with the ring in its page."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        spec = GDNSpec(
            num_k_heads=self.num_k_heads // self.tp_size,
            num_v_heads=self.num_v_heads // self.tp_size,
            head_k_dim=self.head_k_dim,
            head_v_dim=self.head_v_dim,
            conv_kernel=self.conv_kernel_size,
        )
        self.start_replay(vllm_config, spec)
        if self.plan is not None and vllm_config.device_config.device_type == "cpu":
            from replayssm.integrations.vllm.gdn_cpu import route_cpu

            route_cpu()

    def _warmup_prefill_kernels(self, *args: Any, **kwargs: Any) -> None:
        """vLLM takes the state's dtypes apart here and expects its own pair."""
        plan, self.plan = self.plan, None
        try:
            super()._warmup_prefill_kernels(*args, **kwargs)
        finally:
            self.plan = plan

    def _can_use_fused_gdn_mtp_decode(self, attn_metadata: Any) -> bool:
        """vLLM's kernel for drafts runs from the convolution to the gated norm, on a state for every draft."""
        return self.plan is None and super()._can_use_fused_gdn_mtp_decode(attn_metadata)

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Serve a step: mixed_qkv [tokens, channels], b, a [tokens, num_v_heads], core_attn_out [tokens, .., V]."""
        all_metadata = get_forward_context().attn_metadata
        metadata = all_metadata.get(self.prefix) if isinstance(all_metadata, dict) else None
        group = self.group
        if group is None or metadata is None:
            super()._forward_core(mixed_qkv, b, a, core_attn_out)
            return
        rows = group.begin(self.prefix, lambda: gdn_rows(group.plan, metadata))
        inputs, (decoded, prefilled) = (mixed_qkv, b, a), token_parts(metadata)
        if rows.decodes is not None:
            run_part(decoded, inputs, core_attn_out, functools.partial(self._convolve_and_decode, rows))
        if rows.prefills is not None:
            self.before_prefill(rows)
            all_metadata[self.prefix] = only_prefills(metadata)
            try:
                run_part(prefilled, inputs, core_attn_out, super()._forward_core)
            finally:
                all_metadata[self.prefix] = metadata
            self.after_prefill(rows)
        group.end(self.prefix)

    def _convolve_and_decode(
        self, rows: Rows, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor
    ) -> None:
        assert rows.decodes is not None
        weight = self.conv1d.weight.view(self.conv1d.weight.size(0), -1)
        qkv = convolve(mixed_qkv, self.kv_cache[0], weight, self.conv1d.bias, self.activation, rows)
        self.decode(rows.decodes, qkv, b, a, out)

    def decode(self, step: Step, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
        """The recurrence, after the convolution: qkv [tokens, channels], b, a [tokens, num_v_heads], out [.., V]."""
        sizes = [self.key_dim // self.tp_size] * 2 + [self.value_dim // self.tp_size]
        q, k, v = qkv.split(sizes, dim=-1)
        q, k = (x.unflatten(-1, (-1, self.head_k_dim)) for x in (q, k))
        v = v.unflatten(-1, (-1, self.head_v_dim))
        delta_decode(self.cache(), step, q, k, v, a, b, A_log=self.A_log, dt_bias=self.dt_bias, out=out)
