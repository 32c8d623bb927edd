"""The miniatures by family, and how the demo writes with them."""

from __future__ import annotations

from typing import Any

import torch

TITLES: dict[str, str] = {
    "mamba2": "Mamba-2 (nemotron_h)",
    "gdn": "Gated DeltaNet (qwen3_5)",
    "kda": "Kimi Delta Attention (kimi_linear)",
}


def build(family: str, device: torch.device) -> Any:
    """A miniature in fp32; raises ReplayError where its folder is missing."""
    from replayssm.drift.models import load

    model = load(family, device)
    model.generation_config.pad_token_id = 0
    return model
