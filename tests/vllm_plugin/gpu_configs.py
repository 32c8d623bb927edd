"""Models of four layers with recurrent layers of published shapes, as vLLM reads their config.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_COMMON: dict[str, Any] = {
    "dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 512,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEADS: dict[str, Any] = {"num_attention_heads": 16, "num_key_value_heads": 16}
_LATENT: dict[str, Any] = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
_FOUR_LAYERS = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
CONFIGS: dict[str, dict[str, Any]] = {
    "kimi_k3": {
        **_COMMON,
        **_HEADS,
        **_LATENT,
        "architectures": ["KimiLinearForCausalLM"],
        "model_type": "kimi_linear",
        "head_dim": 32,
        "mla_use_nope": True,
        "linear_attn_config": {
            "kda_layers": [1, 2, 4],
            "full_attn_layers": [3],
            "head_dim": 128,
            "num_heads": 24,
            "short_conv_kernel_size": 4,
            "use_full_rank_gate": True,
            "gate_lower_bound": -5.0,
        },
    },
    # Its other layers want packages beside vLLM.
    "glm5_next": {
        **_COMMON,
        **_HEADS,
        "architectures": ["Glm5NextForCausalLM"],
        "model_type": "glm5_next_text",
        "linear_head_dim": 128,
        "linear_num_heads": 24,
        "linear_lower_bound": -5.0,
        "layer_types": ["linear_attention"] * 4,
        "mlp_layer_types": ["dense"] * 4,
        "mhc": False,
        "mla_use_nope": True,
    },
    "bailing": {
        **_COMMON,
        **_HEADS,
        **_LATENT,
        "architectures": ["BailingMoeV3ForCausalLM"],
        "model_type": "bailing_hybrid",
        "head_dim": 128,
        "layer_group_size": 4,
        "kda_safe_gate": True,
        "kda_lower_bound": -5.0,
        "no_kda_lora": True,
        "num_experts": None,
        "first_k_dense_replace": 4,
        "rope_theta": 10000.0,
    },
    "olmo": {
        **_COMMON,
        "architectures": ["OlmoHybridForCausalLM"],
        "model_type": "olmo_hybrid",
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "layer_types": _FOUR_LAYERS,
        "linear_key_head_dim": 96,
        "linear_value_head_dim": 192,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        "linear_conv_kernel_dim": 4,
        "linear_allow_neg_eigval": True,
        "rope_parameters": None,
    },
}


def save_config(name: str, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIGS[name]))
    return folder
