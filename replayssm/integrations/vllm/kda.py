"""Kimi Delta Attention of Kimi-Linear, and what it shares with the other layers of its family."""

from __future__ import annotations

from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import eager_break_during_capture
from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention

from replayssm.checks import check_choice
from replayssm.config import KDASpec
from replayssm.integrations.vllm.conv import convolve
from replayssm.integrations.vllm.delta import ReplayDelta
from replayssm.integrations.vllm.group import Rows
from replayssm.integrations.vllm.options import STATE_DTYPES, chosen_options
from replayssm.step import delta_decode


class ReplayKDA(ReplayDelta):
    """Mixin for vLLM's KDA layers, each of which serves a step by its `_forward`."""

    A_log: torch.Tensor
    dt_bias: torch.Tensor
    head_dim: int

    def start_kda(self, vllm_config: Any, num_heads: int, conv_size: int, lower_bound: float | None) -> None:
        """Called at the end of the layer's construction; num_heads: of this rank."""
        options = chosen_options(vllm_config.additional_config)
        if options is not None:  # their prefill hands the final state back in the dtype that vLLM would store
            stored = STATE_DTYPES.get(self.get_state_dtype()[1])
            check_choice("checkpoint of KDA layers (see --mamba-ssm-cache-dtype)", options.checkpoint, (None, stored))
        heads = (num_heads, num_heads, self.head_dim, self.head_dim)
        self.start_replay(vllm_config, KDASpec(*heads, conv_kernel=conv_size, lower_bound=lower_bound))

    def stock(self, **inputs: torch.Tensor) -> None:
        """vLLM's own `_forward`; it takes its pages apart and expects its own pair."""
        pages = self._pages
        self._pages = pages[:2]
        try:
            super()._forward(**inputs)  # type: ignore[misc]
        finally:
            self._pages = pages

    def recur(self, rows: Rows, qkv: torch.Tensor, g: torch.Tensor, beta: torch.Tensor, out: torch.Tensor) -> None:
        """The recurrence: qkv [tokens, channels] after the convolution, raw g and beta [tokens, heads(, dim)]."""
        assert rows.decodes is not None
        q, k, v = (x.unflatten(-1, (-1, self.head_dim)) for x in qkv.chunk(3, dim=-1))
        gates = {"A_log": self.A_log.flatten(), "dt_bias": self.dt_bias.unflatten(0, (-1, self.head_dim))}
        delta_decode(self.cache(), rows.decodes, q, k, v, g, beta, **gates, out=out)


class ReplayKimi(ReplayKDA):
    """Mixin for the layers of Kimi-Linear and Kimi-K3, whose `_forward` ends with the gated norm."""

    conv1d: Any
    o_norm: Any

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
        self.stock(mixed_qkv=mixed_qkv, g1=g[None], g2=gate, beta=beta[None], core_attn_out=out[None])

    def decode_rows(self, rows: Rows, *inputs: torch.Tensor, out: torch.Tensor) -> None:
        """inputs: mixed_qkv [tokens, channels], the raw gate and the output's gate [tokens, heads, dim], beta."""
        mixed_qkv, g, gate, beta = inputs
        weight = self.conv1d.weight.view(self.conv1d.weight.size(0), -1)
        qkv = convolve(mixed_qkv, self.kv_cache[0], weight, self.conv1d.bias, "silu", rows, cleared=out)
        self.recur(rows, qkv, g, beta, out)
        out.copy_(self.o_norm(out, gate))


class ReplayKimiDelta(ReplayKimi, KimiGatedDeltaNetAttention):
    """vLLM's layer with the ring in its page."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        self.start_kda(vllm_config, self.local_num_heads, self.conv_size, self.gate_lower_bound)
