"""Kimi Delta Attention of Bailing 3 (Ling and Ring), which convolves q, k and v and activates its gates outside."""

from __future__ import annotations

from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first
from vllm.model_executor.models.bailing_moe_v3 import BailingMoeV3KimiDeltaAttention

from replayssm.integrations.vllm.conv import convolve
from replayssm.integrations.vllm.group import Rows
from replayssm.integrations.vllm.kda import ReplayKDA
from replayssm.step import delta_decode


class ReplayBailing(ReplayKDA, BailingMoeV3KimiDeltaAttention):
    """vLLM's layer with the ring in its page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        bound = self.lower_bound if self.safe_gate else None
        self.start_kda(get_current_vllm_config(), self.local_num_heads, self.conv_size, bound)

    def _forward(
        self,
        q_proj_states: torch.Tensor,
        k_proj_states: torch.Tensor,
        v_proj_states: torch.Tensor,
        g1: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Serve a step: q, k, v [tokens, channels], the log decay g1 and beta [1, tokens, heads(, dim)]."""
        self.serve((q_proj_states, k_proj_states, v_proj_states, g1[0], beta[0]), core_attn_out[0], self._stock)

    def _stock(self, *inputs: torch.Tensor) -> None:
        q, k, v, g, beta, out = inputs
        projected = {"q_proj_states": q, "k_proj_states": k, "v_proj_states": v}
        self.stock(**projected, g1=g[None], beta=beta[None], core_attn_out=out[None])

    def decode_rows(self, rows: Rows, *inputs: torch.Tensor, out: torch.Tensor) -> None:
        """inputs: q, k, v [tokens, channels], the log decay [tokens, heads, dim], beta [tokens, heads]."""
        assert rows.decodes is not None
        *projected, g, beta = inputs
        convolutions, pages = (self.q_conv1d, self.k_conv1d, self.v_conv1d), self.kv_cache[0]
        parts = pages.chunk(3, dim=1 if is_conv_state_dim_first() else 2)
        q, k, v = (
            convolve(x, part, conv.weight.flatten(1), conv.bias, "silu", rows).unflatten(-1, (-1, self.head_dim))
            for x, part, conv in zip(projected, parts, convolutions, strict=True)
        )
        delta_decode(self.cache(), rows.decodes, q, k, v, g, beta, out=out)
