"""What Gated DeltaNet and Kimi Delta Attention share: decode rows through the ring, prefill rows by vLLM."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from vllm.forward_context import get_forward_context

from replayssm.integrations.vllm.delta_rows import delta_rows, only_prefills, run_part, token_parts
from replayssm.integrations.vllm.group import Rows
from replayssm.integrations.vllm.layer import ReplayLayer

Inputs = tuple[torch.Tensor, ...]


class ReplayDelta(ReplayLayer):
    """Mixin for vLLM's layers whose steps come as `GDNAttentionMetadata`."""

    prefix: str

    def decode_rows(self, rows: Rows, *inputs: torch.Tensor, out: torch.Tensor) -> None:
        """Convolution and recurrence of decode rows: inputs and out of their tokens alone."""
        raise NotImplementedError

    def complete(self, metadata: Any) -> None:
        """Fill in what a layer's own metadata leave out of `GDNAttentionMetadata`."""

    def serve(self, inputs: Inputs, out: torch.Tensor, stock: Callable[..., None]) -> None:
        """One step: inputs [tokens, ..] to out [tokens, heads, V]; `stock(*inputs, out)` is vLLM's own layer."""
        all_metadata = get_forward_context().attn_metadata
        metadata = all_metadata.get(self.prefix) if isinstance(all_metadata, dict) else None
        group = self.group
        if group is None or metadata is None:
            stock(*inputs, out)
            return
        self.complete(metadata)
        rows = group.begin(self.prefix, lambda: delta_rows(group.plan, metadata))
        decoded, prefilled = token_parts(metadata)
        if not isinstance(decoded, slice):
            out.zero_()  # the padding of a batch that was captured in pieces
        if rows.decodes is not None:
            run_part(decoded, inputs, out, lambda *part: self.decode_rows(rows, *part[:-1], out=part[-1]))
        if rows.prefills is not None:
            self.before_prefill(rows)
            all_metadata[self.prefix] = only_prefills(metadata)
            try:
                run_part(prefilled, inputs, out, stock)
            finally:
                all_metadata[self.prefix] = metadata
            self.after_prefill(rows)
        elif isinstance(decoded, slice):
            out[decoded.stop :].zero_()  # likewise
        group.end(self.prefix)
