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
# With many heads, so that an attention block as large as a state holds few tokens.
_REAL: dict[str, Any] = {
    "hidden_size": 512,
    "head_dim": 128,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "intermediate_size": 512,
}
_FOUR_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_REAL_GDN: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": _FOUR_LAYERS,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
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
    "granite": ("granitemoehybrid", {**_ATTENTION, "mamba_d_head": 16, "mamba_d_state": 32, "num_experts_per_tok": 4}),
    "falcon_h1": (
        "falcon_h1",
        {
            **_ATTENTION,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_d_ssm": 128,
            "key_multiplier": 0.5,
            "ssm_multipliers": [0.5, 0.7, 0.9, 1.1, 1.3],
            "ssm_out_multiplier": 0.9,
        },
    ),
    "mamba2": ("mamba2", {**_ATTENTION, "num_heads": 8, "head_dim": 16, "intermediate_size": 128}),
    "zamba2": (
        "zamba2",
        {**_ATTENTION, "attention_head_dim": 64, "n_mamba_heads": 8, "mamba_ngroups": 2, "mamba_d_state": 16},
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
    # Those of Granite 4: one group for all heads, which every rank of a parallel engine has to itself.
    "granite_layers": (
        "nemotron_h",
        {
            **_ATTENTION,
            **_REAL,
            "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention", "linear_attention"],
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 1,
            "chunk_size": 256,
        },
    ),
    "qwen35_layers": (
        "qwen3_5",
        {
            **_ATTENTION,
            **_REAL,
            **_REAL_GDN,
            "rope_parameters": {**_ROPE, "mrope_section": [11, 11, 10]},
        },
    ),
    "next_layers": (
        "qwen3_next",
        {
            **_ATTENTION,
            **_REAL,
            **_REAL_GDN,
            "mlp_only_layers": [0, 1, 3],
            "num_experts_per_tok": 4,  # all
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "rope_parameters": _ROPE,
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
    if name == "qwen35_layers":
        _add_mtp(folder)
    return folder


def _add_mtp(folder: Path) -> None:
    """Give the checkpoint a layer that drafts (multi-token prediction), under the published names, if it has none."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    if "mtp_num_hidden_layers" in config:
        return
    weights = load_file(folder / "model.safetensors")
    hidden, attention = config["hidden_size"], _FOUR_LAYERS.index("full_attention")
    layer = f".layers.{attention}."
    for name in [name for name in weights if layer in name]:
        weights["mtp.layers.0." + name.partition(layer)[2]] = weights[name].clone()
    for norm in ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding"):
        weights[f"mtp.{norm}.weight"] = torch.zeros(hidden, dtype=torch.bfloat16)
    fc = torch.empty(hidden, 2 * hidden).normal_(generator=torch.Generator().manual_seed(0))
    weights["mtp.fc.weight"] = (fc / (2 * hidden) ** 0.5).bfloat16()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({**config, "mtp_num_hidden_layers": 1}))


if __name__ == "__main__":
    save(sys.argv[1], Path(sys.argv[2]))
