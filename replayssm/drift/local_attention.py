"""Attention to the last `attention_window` tokens, as an attention implementation of transformers.

Its cost grows linearly with the text, so that 128K tokens stay cheap, and whatever lies further back can only reach a
prediction through the recurrent states.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

NAME = "replayssm_local"


def register() -> str:
    """Make the implementation known to transformers; returns its name, for `attn_implementation`."""
    from transformers import AttentionInterface
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    AttentionInterface.register(NAME, attend)
    ALL_MASK_ATTENTION_FUNCTIONS.register(NAME, _no_mask)
    return NAME


def _no_mask(*_: Any, **__: Any) -> None:
    """The window is the mask."""


def attend(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, heads, T, D], key and value [B, kv_heads, S, D]; the queries are those of the last T of S tokens."""
    window = module.config.attention_window
    groups = query.shape[1] // key.shape[1]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, dim=1) for t in (key, value))
    tokens, keys = query.shape[2], key.shape[2]
    if tokens == keys and tokens > 2 * window:
        out = _blocks(query, key, value, window, scaling)
    else:
        first = max(0, keys - tokens - window + 1)
        mask = _band(tokens, keys - first, window, query.device)
        out = F.scaled_dot_product_attention(query, key[:, :, first:], value[:, :, first:], mask, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def _band(tokens: int, keys: int, window: int, device: torch.device) -> torch.Tensor:
    """Mask [tokens, keys]: the last `window` keys up to a query's own, the last query's own key being the last one."""
    own = torch.arange(keys - tokens, keys, device=device)[:, None]
    key = torch.arange(keys, device=device)
    return (key <= own) & (key > own - window)


def _blocks(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, window: int, scaling: float) -> torch.Tensor:
    """Blocks of `window` queries, each against its own block of keys and the one before."""
    batch, _, tokens, _ = query.shape
    padding = -tokens % window
    query, key, value = (F.pad(t, (0, 0, 0, padding)) for t in (query, key, value))
    blocks = (tokens + padding) // window

    def fold(t: torch.Tensor) -> torch.Tensor:
        return t.unflatten(2, (blocks, window)).transpose(1, 2)  # [B, blocks, heads, window, D]

    def with_previous(t: torch.Tensor) -> torch.Tensor:
        folded = fold(t)
        previous = F.pad(folded[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
        return torch.cat((previous, folded), dim=3).flatten(0, 1)

    mask = _band(window, 2 * window, window, query.device).repeat(blocks, 1, 1)
    mask[0, :, :window] = False
    mask = mask.repeat(batch, 1, 1)[:, None]
    out = F.scaled_dot_product_attention(
        fold(query).flatten(0, 1), with_previous(key), with_previous(value), mask, scale=scaling
    )
    return out.unflatten(0, (batch, blocks)).transpose(1, 2).flatten(2, 3)[:, :, :tokens]
