"""Kimi-Linear as vLLM reads it, without experts; transformers writes another config.json and other names for that."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

# The KDA and attention layers of the published model between narrow others.
KIMI: dict[str, Any] = {
    "architectures": ["KimiLinearForCausalLM"],
    "model_type": "kimi_linear",
    "dtype": "bfloat16",
    "vocab_size": 128,
    "hidden_size": 512,
    "head_dim": 32,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "mla_use_nope": True,
    "linear_attn_config": {
        "kda_layers": [1, 2, 4],
        "full_attn_layers": [3],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
}


def kimi_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """The tensors of a checkpoint by name."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    kda, heads, rank = config["linear_attn_config"], config["num_attention_heads"], config["kv_lora_rank"]
    nope, rope, v_dim = (config[name] for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    dim, width = kda["head_dim"], kda["num_heads"] * kda["head_dim"]
    delta: dict[str, tuple[int, ...]] = {f"{x}_proj.weight": (width, hidden) for x in "qkv"}
    delta |= {f"{x}_conv1d.weight": (width, 1, kda["short_conv_kernel_size"]) for x in "qkv"}
    delta |= {f"{x}_a_proj.weight": (dim, hidden) for x in "fg"} | {f"{x}_b_proj.weight": (width, dim) for x in "fg"}
    delta |= {"b_proj.weight": (kda["num_heads"], hidden), "o_norm.weight": (dim,), "o_proj.weight": (hidden, width)}
    delta |= {"A_log": (1, 1, kda["num_heads"], 1), "dt_bias": (width,)}
    attention: dict[str, tuple[int, ...]] = {"q_proj.weight": (heads * (nope + rope), hidden)}
    attention |= {"kv_a_proj_with_mqa.weight": (rank + rope, hidden), "kv_a_layernorm.weight": (rank,)}
    attention |= {"kv_b_proj.weight": (heads * (nope + v_dim), rank), "o_proj.weight": (hidden, heads * v_dim)}
    mlp = {"gate_proj.weight": (inner, hidden), "up_proj.weight": (inner, hidden), "down_proj.weight": (hidden, inner)}
    shapes = {
        "lm_head.weight": (128, hidden),
        "model.embed_tokens.weight": (128, hidden),
        "model.norm.weight": (hidden,),
    }
    for i in range(config["num_hidden_layers"]):
        mixer = delta if i + 1 in kda["kda_layers"] else attention
        parts = {"self_attn": mixer, "mlp": mlp, "input_layernorm": {"weight": (hidden,)}}
        for part, tensors in {**parts, "post_attention_layernorm": {"weight": (hidden,)}}.items():
            shapes |= {f"model.layers.{i}.{part}.{name}": shape for name, shape in tensors.items()}
    return shapes


def save_kimi(folder: Path, config: dict[str, Any]) -> Path:
    """Write Kimi-Linear with random weights whose recurrences remember and forget, unless it is there."""
    import torch
    from safetensors.torch import save_file
    from tiny_models import _randomise

    if not (folder / "config.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        generator, weights = torch.Generator().manual_seed(0), {}
        for name, shape in kimi_shapes(config).items():
            kind, norm = name.rpartition(".")[2], "norm" in name
            dtype = torch.float32 if kind in ("A_log", "dt_bias") else torch.bfloat16
            weights[name] = torch.full(shape, float(norm), dtype=dtype)
            _randomise(kind, weights[name], generator)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config))
    return folder
