"""Kimi Delta Attention of GLM-5.3-Flash, whose convolutions of q, k and v have weights of their own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.models.glm5next.common.kda import Glm5NextLinearAttention

from replayssm.integrations.vllm.conv import convolve
from replayssm.integrations.vllm.group import Group, Rows
from replayssm.integrations.vllm.kda import ReplayKDA


class ReplayGlm5Next(ReplayKDA, Glm5NextLinearAttention):
    """vLLM's layer with the ring in its page."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        self.start_kda(vllm_config, self.local_num_heads, self.conv_size, self.kda_lower_bound)

    def join(self, group: Group) -> None:
        """Weights are loaded by now; vLLM would merge those of the convolutions in its first step."""
        super().join(group)
        convolutions = (self.q_conv1d, self.k_conv1d, self.v_conv1d)
        self._merged_conv_weight = torch.cat([conv.weight.flatten(1) for conv in convolutions])

    @eager_break_during_capture
    def _forward(
        self, qkv_proj_states: torch.Tensor, g1: torch.Tensor, beta: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Serve a step: qkv_proj_states [tokens, channels], the others [1, tokens, heads(, dim)]; the norm follows."""
        self.serve((qkv_proj_states, g1[0], beta[0]), core_attn_out[0], self._stock)

    def _stock(self, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, out: torch.Tensor) -> None:
        self.stock(qkv_proj_states=qkv, g1=g[None], beta=beta[None], core_attn_out=out[None])

    def decode_rows(self, rows: Rows, *inputs: torch.Tensor, out: torch.Tensor) -> None:
        """inputs: qkv [tokens, channels], the raw gate [tokens, heads, dim], beta [tokens, heads]."""
        qkv, g, beta = inputs
        weight, bias = self._merged_conv_weight, self.q_conv1d.bias
        qkv = convolve(qkv, self.kv_cache[0], weight, bias, "silu", rows, cleared=out)
        self.recur(rows, qkv, g, beta, out)
