"""Mamba-2 of NemotronH, Granite 4 and Falcon-H1: decode rows through the ring, prefill rows by vLLM."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

from replayssm.config import Mamba2Spec
from replayssm.integrations.vllm.conv import convolve
from replayssm.integrations.vllm.group import Rows, continued_blocks, decode_step
from replayssm.integrations.vllm.layer import ReplayLayer
from replayssm.step import mamba2_decode


class ReplayMambaMixer2(ReplayLayer, MambaMixer2):
    """vLLM's layer with the ring in its page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        spec = Mamba2Spec(
            num_heads=self.num_heads // self.tp_size,
            head_dim=self.head_dim,
            d_state=self.ssm_state_size,
            n_groups=self.n_groups // self.tp_size,
            conv_kernel=self.conv_kernel_size,
        )
        self.start_replay(get_current_vllm_config(), spec)

    def conv_ssm_forward(self, projected_states: torch.Tensor, output: torch.Tensor) -> Any:
        """Serve the rows of a step; projected_states and output hold the tokens of decode rows first."""
        all_metadata = get_forward_context().attn_metadata
        metadata = all_metadata.get(self.prefix) if isinstance(all_metadata, dict) else None
        if self.group is None or metadata is None:
            return super().conv_ssm_forward(projected_states, output)
        rows, n = self.group.begin(self.prefix, lambda: self._rows(metadata)), metadata.num_decode_tokens
        if rows.decodes is not None:
            self._decode(rows, projected_states[:n], output[:n])
        if rows.prefills is not None:
            self.before_prefill(rows)
            all_metadata[self.prefix] = replace(metadata, num_decodes=0, num_decode_tokens=0)
            try:
                super().conv_ssm_forward(projected_states[n:], output[n:])
            finally:
                all_metadata[self.prefix] = metadata
            self.after_prefill(rows)
        self.group.end(self.prefix)
        return None

    def _rows(self, metadata: Any) -> Rows:
        assert self.plan is not None
        step, accepted = None, None
        if metadata.num_decodes:
            step = decode_step(self.plan, metadata.state_indices_tensor_d[:, 0], metadata.query_start_loc_d)
            accepted = metadata.num_accepted_tokens
        if metadata.num_prefills == 0:
            return Rows(step, accepted)
        blocks = metadata.state_indices_tensor_p
        return Rows(step, accepted, blocks, continued_blocks(blocks, metadata.has_initial_states_p))

    def _decode(self, rows: Rows, projected: torch.Tensor, out: torch.Tensor) -> None:
        assert rows.decodes is not None
        sizes = [self.tped_intermediate_size, self.tped_conv_size, self.tped_dt_size]
        _, xBC, dt = projected.split(sizes, dim=-1)
        xBC = convolve(xBC, self.kv_cache[0], self.conv_weights, self.conv1d.bias, self.activation, rows)
        x, B, C = self.split_hidden_states_B_C_fn(xBC)
        x, out = (t.unflatten(-1, (-1, self.head_dim)) for t in (x, out))
        B, C = (t.unflatten(-1, (-1, self.ssm_state_size)) for t in (B, C))
        mamba2_decode(self.cache(), rows.decodes, x, dt, self.A, B, C, D=self.D, dt_bias=self.dt_bias, out=out)
