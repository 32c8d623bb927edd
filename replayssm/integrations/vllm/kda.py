"""Kimi Delta Attention of Kimi-Linear."""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

from replayssm.config import KDASpec
from replayssm.integrations.vllm.conv import convolve
from replayssm.integrations.vllm.delta import ReplayDelta
from replayssm.integrations.vllm.group import Rows
from replayssm.step import delta_decode


class ReplayKimiDelta(ReplayDelta, KimiGatedDeltaNetAttention):
    """vLLM's layer with the ring in its page."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        spec = KDASpec(
            num_k_heads=self.local_num_heads,
            num_v_heads=self.local_num_heads,
            head_k_dim=self.head_dim,
            head_v_dim=self.head_dim,
            conv_kernel=self.conv_size,
            lower_bound=self.gate_lower_bound,
        )
        self.start_replay(vllm_config, spec)

    @eager_break_during_capture
    def _forward(
        self,
        mixed_qkv: torch.Tensor,
        g1: torch.Tensor,
        g2: torch.Tensor,
        beta: torch.Tensor,
        core_attn_out: torch.Tensor,
    ) -> None:
        """Serve a step: mixed_qkv [tokens, channels], g2 [tokens, heads, V], the others [1, tokens, heads(, dim)]."""
        self.serve((mixed_qkv, g1[0], g2, beta[0]), core_attn_out[0], self._stock)

    def _stock(
        self, mixed_qkv: torch.Tensor, g: torch.Tensor, gate: torch.Tensor, beta: torch.Tensor, out: torch.Tensor
    ) -> None:
        """vLLM's own, gated norm included; it takes its pages apart and expects its own pair."""
        pages = self._pages
        self._pages = pages[:2]
        try:
            super()._forward(mixed_qkv, g[None], gate, beta[None], out[None])
        finally:
            self._pages = pages

    def decode_rows(self, rows: Rows, *inputs: torch.Tensor, out: torch.Tensor) -> None:
        """inputs: mixed_qkv [tokens, channels], the raw gate and the output's gate [tokens, heads, dim], beta."""
        assert rows.decodes is not None
        mixed_qkv, g, gate, beta = inputs
        weight = self.conv1d.weight.view(self.conv1d.weight.size(0), -1)
        qkv = convolve(mixed_qkv, self.kv_cache[0], weight, self.conv1d.bias, "silu", rows)
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv.chunk(3, dim=-1))
        dt_bias = self.dt_bias.unflatten(0, (-1, self.head_dim))
        delta_decode(self.cache(), rows.decodes, q, k, v, g, beta, A_log=self.A_log, dt_bias=dt_bias, out=out)
        out.copy_(self.o_norm(out, gate))
