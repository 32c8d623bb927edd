"""Gated DeltaNet of OLMo Hybrid, whose beta may reach 2: the state is then reflected along a key."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mamba.gdn.olmo_gdn_linear_attn import (
    OlmoHybridGatedDeltaNetAttention,
    fused_olmo_hybrid_gdn_gating,
)

from replayssm.integrations.vllm.conv import convolve
from replayssm.integrations.vllm.gdn import ReplayGDN
from replayssm.integrations.vllm.group import Rows
from replayssm.step import delta_decode


class ReplayOlmo(ReplayGDN, OlmoHybridGatedDeltaNetAttention):
    """vLLM's layer with the ring in its page."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        self.start_gdn(vllm_config)

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Serve a step: mixed_qkv [tokens, channels], b, a [tokens, num_v_heads], core_attn_out [tokens, .., V]."""
        self.serve((mixed_qkv, b, a), core_attn_out, super()._forward_core)

    def decode_rows(self, rows: Rows, *inputs: torch.Tensor, out: torch.Tensor) -> None:
        """inputs: as `_forward_core`'s, of decode rows."""
        assert rows.decodes is not None
        mixed_qkv, b, a = inputs
        weight = self.conv1d.weight.flatten(1)
        qkv = convolve(mixed_qkv, self.kv_cache[0], weight, None, self.activation, rows)
        g, beta = fused_olmo_hybrid_gdn_gating(self.A_log, a, b, self.dt_bias, self.allow_neg_eigval)
        delta_decode(self.cache(), rows.decodes, *self.split_qkv(qkv), g[0], beta[0], out=out)
