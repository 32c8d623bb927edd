"""Random models as checkpoints that vLLM loads: `python models.py NAME FOLDER` with transformers."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
_ATTENTION: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "head_dim": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
}
_REAL: dict[str, Any] = {"hidden_size": 512, "head_dim": 128, "num_attention_heads": 4, "intermediate_size": 512}
_FOUR_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
# vLLM's CPU kernels take few sizes: 32 for attention, 64 for GDN, convolutions of a multiple of 64 channels.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nemotron_h": ("nemotron_h", {**_ATTENTION, "mamba_head_dim": 16}),
    "qwen3_next": (
        "qwen3_next",
        {
            **_ATTENTION,
            "head_dim": 64,  # with many heads, so that a block holds few tokens
            "num_attention_heads": 8,
            "num_key_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "mlp_only_layers": [0, 1],
            "num_experts_per_tok": 4,  # all: where two are nearly equal, a choice of them turns noise into a jump
            "rope_parameters": _ROPE,
        },
    ),
    # The SSM layers of Nemotron-3-Nano-4B and Qwen3.5-4B between narrow others.
    "nano_layers": (
        "nemotron_h",
        {
            **_ATTENTION,
            **_REAL,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "linear_attention"],
            "mamba_num_heads": 96,
            "mamba_head_dim": 80,
            "ssm_state_size": 128,
            "n_groups": 8,
            "chunk_size": 256,
        },
    ),
    "qwen35_layers": (
        "qwen3_5",
        {
            **_ATTENTION,
            **_REAL,
            "num_hidden_layers": 4,
            "layer_types": _FOUR_LAYERS,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "rope_parameters": {**_ROPE, "mrope_section": [11, 11, 10]},
        },
    ),
}


def save(name: str, folder: Path) -> Path:
    """Write the model `name`, unless it is there."""
    import torch
    from kimi_model import KIMI, save_kimi
    from tiny_models import tiny_model

    if name == "kimi_layers":
        return save_kimi(folder, KIMI)
    if not (folder / "config.json").exists():
        architecture, changes = MODELS[name]
        tiny_model(architecture, dtype=torch.bfloat16, **changes).save_pretrained(folder)
        config = json.loads((folder / "config.json").read_text())
        config["max_position_embeddings"] = 4096
        config.get("rope_parameters", {}).pop("mrope_section", None)  # text only
        (folder / "config.json").write_text(json.dumps(config))
    return folder


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
