"""Tiny random models of every architecture, with weights whose recurrences remember and forget."""

from __future__ import annotations

import math
from typing import Any

import torch

_COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
_MAMBA: dict[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_n_groups": 2,
    "mamba_d_state": 16,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 16,
}
_GDN: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 8,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [1, 1, 0],
        "partial_rotary_factor": 0.5,
    },
}
_MOE: dict[str, Any] = {
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts_per_tok": 2,
    "num_experts": 4,
}
_KDA: dict[str, Any] = {
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "mlp_layer_types": ["dense", "sparse", "sparse"],
    "num_key_value_heads": 4,
    "linear_head_dim": 16,
    "linear_num_heads": 4,
    "linear_conv_kernel_dim": 4,
    "kv_lora_rank": 8,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 8,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}

_CONFIGS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp", "linear_attention"],
        "head_dim": 8,
        "mamba_num_heads": 8,
        "mamba_head_dim": 10,
        "ssm_state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 16,
    },
    "mamba2": {
        "num_hidden_layers": 2,
        "num_heads": 8,
        "head_dim": 8,
        "state_size": 16,
        "n_groups": 2,
        "conv_kernel": 4,
        "expand": 2,
        "chunk_size": 16,
    },
    "bamba": {**_MAMBA, "num_hidden_layers": 3, "attn_layer_indices": [1]},
    "falcon_h1": {**_MAMBA, "num_hidden_layers": 2, "mamba_d_ssm": 48, "mamba_n_heads": 4, "mamba_d_head": 12},
    "granitemoehybrid": {
        **_MAMBA,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_groups": 1,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "shared_intermediate_size": 16,
    },
    "zamba2": {
        "num_hidden_layers": 3,
        "layers_block_type": ["linear_attention", "hybrid", "linear_attention"],
        "mamba_d_state": 16,
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "mamba_ngroups": 1,
        "n_mamba_heads": 4,
        "chunk_size": 16,
        "num_mem_blocks": 1,
        "adapter_rank": 4,
    },
    "qwen3_5": {**_GDN},
    "qwen3_5_moe": {**_GDN, **_MOE},
    "qwen3_next": {**_GDN, **_MOE},
    "olmo_hybrid": {**_GDN, "linear_num_key_heads": 4, "rope_parameters": None},
    "kimi_linear": {**_KDA},
    "glm5_next": {
        **{k: v for k, v in _KDA.items() if k != "num_local_experts"},
        "n_routed_experts": 4,
        "q_lora_rank": 8,
        "qk_rope_head_dim": 0,
        "index_topk": 512,
        "index_head_dim": 8,
        "index_n_heads": 2,
        "hc_mult": 2,
    },
    "bailing_hybrid": {**_KDA, "head_dim": 16, "linear_head_dim": 16, "short_conv_kernel_size": 4, "num_mtp_layers": 0},
}

_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "intermediate_size": 16,
    "out_hidden_size": 32,
    "projection_intermediate_size": 16,
    "num_position_embeddings": 16,
}

MAMBA2_ARCHITECTURES = ("nemotron_h", "mamba2", "bamba", "falcon_h1", "granitemoehybrid", "zamba2")
DELTA_ARCHITECTURES = tuple(name for name in _CONFIGS if name not in MAMBA2_ARCHITECTURES)


def available_architectures() -> tuple[str, ...]:
    """The architectures that the installed transformers has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return tuple(name for name in _CONFIGS if name in CONFIG_MAPPING)


def tiny_config(name: str, **changes: Any) -> Any:
    """A transformers configuration whose model has a few thousand parameters."""
    from transformers import AutoConfig

    text = {**_COMMON, **_CONFIGS[name], **changes}
    if name == "glm5_next":  # only exists as a vision-language model
        return AutoConfig.for_model(name, text_config={**text, "model_type": "glm5_next_text"}, vision_config=_VISION)
    return AutoConfig.for_model(name + "_text" if name in ("qwen3_5", "qwen3_5_moe") else name, **text)


def tiny_model(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A causal language model with random weights, in eval mode, that never stops by itself."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    torch.manual_seed(seed)
    auto = AutoModelForImageTextToText if name == "glm5_next" else AutoModelForCausalLM
    # The grouped product of experts has no float64.
    model = auto.from_config(tiny_config(name, **changes), experts_implementation="eager").to(dtype).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            _randomise(parameter_name.rpartition(".")[2], parameter, generator)
    return model


def tiny_llama() -> Any:
    """A model without SSM layers, of the same vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(vocab_size=61, pad_token_id=0, eos_token_id=None, **shape)).eval()


def _randomise(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.empty(parameter.shape).normal_(generator=generator)
    if name == "A_log":
        parameter.copy_(0.7 * noise)
    elif name == "dt_bias":
        parameter.copy_(noise - 3.0)
    elif name == "D" or parameter.dim() == 1:
        parameter.add_((0.1 * noise).to(parameter.dtype))
    else:
        parameter.copy_(noise / math.sqrt(parameter.shape[-1]))
