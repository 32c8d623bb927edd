"""Gated DeltaNet of Qwen3-Next and Qwen3.5, and what it shares with the other layers of its family."""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.utils.torch_utils import _encode_layer_name

from replayssm.config import GDNSpec
from replayssm.cursors import Step
from replayssm.integrations.vllm.conv import convolve
from replayssm.integrations.vllm.delta import ReplayDelta
from replayssm.integrations.vllm.group import Rows
from replayssm.integrations.vllm.joined import Joined, joined
from replayssm.step import delta_decode


class ReplayGDN(ReplayDelta):
    """Mixin for vLLM's layers of Gated DeltaNet; their sizes are those of all ranks."""

    tp_size: int
    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    key_dim: int
    value_dim: int
    conv_kernel_size: int

    def start_gdn(self, vllm_config: Any) -> None:
        """Called at the end of the layer's construction."""
        spec = GDNSpec(
            num_k_heads=self.num_k_heads // self.tp_size,
            num_v_heads=self.num_v_heads // self.tp_size,
            head_k_dim=self.head_k_dim,
            head_v_dim=self.head_v_dim,
            conv_kernel=self.conv_kernel_size,
        )
        self.start_replay(vllm_config, spec)

    def split_qkv(self, qkv: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k [tokens, num_k_heads, K] and v [tokens, num_v_heads, V] of qkv [tokens, channels]."""
        q, k, v = qkv.split([self.key_dim // self.tp_size] * 2 + [self.value_dim // self.tp_size], dim=-1)
        q, k = (x.unflatten(-1, (-1, self.head_k_dim)) for x in (q, k))
        return q, k, v.unflatten(-1, (-1, self.head_v_dim))


class ReplayGatedDeltaNet(ReplayGDN, QwenGatedDeltaNetAttention):
    """vLLM's layer with the ring in its page."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        self.start_gdn(vllm_config)
        self.in_proj: Joined | None = None  # in_proj_qkvz and in_proj_ba as one product, where they can be
        if self.plan is None:
            return
        if vllm_config.device_config.device_type == "cpu":
            from replayssm.integrations.vllm.gdn_cpu import route_cpu

            route_cpu()
        elif vllm_config.lora_config is None and not self.gqa_interleaved_layout:
            self.in_proj = joined(self.in_proj_qkvz, self.in_proj_ba)

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

    def forward_cuda(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """vLLM's projections and norm around a core that takes them packed: it copies no gate and clears no output."""
        if self.plan is None or self.gqa_interleaved_layout:
            return super().forward_cuda(hidden_states)
        qkv_size, z_size = self._qkv_size(), self.value_dim // self.tp_size
        if self.in_proj is not None:
            qkvz = self.in_proj(hidden_states)
            ba = qkvz[:, qkv_size + z_size :]
        else:
            qkvz, _ = self.in_proj_qkvz(hidden_states)
            ba, _ = self.in_proj_ba(hidden_states)
        out = qkvz.new_empty(qkvz.shape[0], self.num_v_heads // self.tp_size, self.head_v_dim)
        name = _encode_layer_name(self.prefix)
        torch.ops.vllm.qwen_gdn_attention_core(qkvz, ba, qkvz.new_empty(0), out, layer_name=name)
        z = qkvz[:, qkv_size : qkv_size + z_size].unflatten(-1, (-1, self.head_v_dim))
        return self._output_projection(out, z)

    def _qkv_size(self) -> int:
        return (2 * self.key_dim + self.value_dim) // self.tp_size

    def _forward_core(
        self, mixed_qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, core_attn_out: torch.Tensor
    ) -> None:
        """Serve a step: mixed_qkv [tokens, channels], b, a [tokens, num_v_heads], core_attn_out [tokens, .., V].

        Or packed, from `forward_cuda`: a empty, mixed_qkv with z behind it and b with a behind it.
        """
        if a.dim() > 1:
            self.serve((mixed_qkv, b, a), core_attn_out, super()._forward_core)
            return
        inputs = (mixed_qkv[:, : self._qkv_size()], *self.split_ba(b))
        self.serve(inputs, core_attn_out, self._prefill_packed)

    def _prefill_packed(self, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
        """vLLM's core, which wants contiguous gates and leaves the outputs of padding as they are."""
        out.zero_()
        super()._forward_core(qkv, b.contiguous(), a.contiguous(), out)

    def decode_rows(self, rows: Rows, *inputs: torch.Tensor, out: torch.Tensor) -> None:
        """inputs: mixed_qkv [tokens, channels], b, a [tokens, num_v_heads]."""
        assert rows.decodes is not None
        mixed_qkv, b, a = inputs
        weight = self.conv1d.weight.view(self.conv1d.weight.size(0), -1)
        qkv = convolve(mixed_qkv, self.kv_cache[0], weight, self.conv1d.bias, self.activation, rows, cleared=out)
        self.decode(rows.decodes, qkv, b, a, out)

    def decode(self, step: Step, qkv: torch.Tensor, b: torch.Tensor, a: torch.Tensor, out: torch.Tensor) -> None:
        """The recurrence, after the convolution: qkv [tokens, channels], b, a [tokens, num_v_heads], out [.., V]."""
        delta_decode(self.cache(), step, *self.split_qkv(qkv), a, b, A_log=self.A_log, dt_bias=self.dt_bias, out=out)
