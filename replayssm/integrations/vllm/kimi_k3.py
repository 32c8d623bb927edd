"""Kimi Delta Attention of Kimi-K3: Kimi-Linear's recurrence behind metadata of its own."""

from __future__ import annotations

from typing import Any

import torch
from vllm.models.kimi_k3.nvidia.kda import KimiK3DeltaAttention
from vllm.models.kimi_k3.nvidia.kda_metadata import KimiK3KDAAttentionBackend, KimiK3KDAMetadataBuilder

from replayssm.integrations.vllm.kda import ReplayKimi


class ReplayKimiK3(ReplayKimi, KimiK3DeltaAttention):
    """vLLM's layer with the ring in its page."""

    def __init__(self, config: Any, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, vllm_config, *args, **kwargs)
        self.start_kda(vllm_config, self.local_num_heads, self.conv_size, self.gate_lower_bound)

    def get_attn_backend(self) -> Any:
        """vLLM's, for one block a request however many tokens it drafts."""
        return super().get_attn_backend() if self.plan is None else OneBlockBackend

    def complete(self, metadata: Any) -> None:
        """As below; the layers of a group share their metadata, and filling them in again changes nothing."""
        complete(metadata)


class OneBlockBuilder(KimiK3KDAMetadataBuilder):
    """vLLM's, which would read a block for every draft; all its columns but the first are unused here."""

    spec_state_indices_tensor: torch.Tensor

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.spec_state_slots = 1
        self.spec_state_indices_tensor = self.spec_state_indices_tensor[:, :1].contiguous()


class OneBlockBackend(KimiK3KDAAttentionBackend):
    @staticmethod
    def get_builder_cls() -> type[OneBlockBuilder]:
        return OneBlockBuilder


def complete(metadata: Any) -> None:
    """Fill in what Kimi-K3's metadata leave out and `delta_rows` reads of those of other delta-rule layers."""
    n, end = metadata.num_decodes, metadata.num_decodes + metadata.num_prefills
    if metadata.num_spec_decodes:
        metadata.spec_sequence_masks = metadata.spec_state_indices_tensor  # only asked whether there are any
        metadata.spec_token_start = metadata.non_spec_token_start = None
    elif end == n:
        metadata.num_actual_tokens = min(metadata.num_actual_tokens, len(metadata.non_spec_state_indices_tensor))
    if end > n and metadata.prefill_state_indices is None:
        starts = metadata.non_spec_query_start_loc[n : end + 1]
        metadata.prefill_query_start_loc = starts - metadata.num_decode_tokens if n else starts
        metadata.prefill_state_indices = metadata.non_spec_state_indices_tensor[n:end]
        metadata.prefill_has_initial_state = metadata.has_initial_state[n:end]
