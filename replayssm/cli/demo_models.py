"""Small hybrid models of the three families over bytes, with seeded random weights."""

from __future__ import annotations

import math
from typing import Any

import torch

# Real head dimensions, few heads: the state traffic keeps the proportions of a full-size model.
_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "mlp", "linear_attention", "full_attention", "linear_attention"],
        "head_dim": 32,
        "mamba_num_heads": 4,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "n_groups": 2,
        "conv_kernel": 4,
        "chunk_size": 64,
    },
    "qwen3_5_text": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "head_dim": 32,
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    "kimi_linear": {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
        "mlp_layer_types": ["dense"] * 4,
        "linear_num_heads": 2,
        "linear_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
    },
}
FAMILIES: dict[str, str] = {"mamba2": "nemotron_h", "gdn": "qwen3_5_text", "kda": "kimi_linear"}
TITLES: dict[str, str] = {
    "mamba2": "Mamba-2 (nemotron_h)",
    "gdn": "Gated DeltaNet (qwen3_5)",
    "kda": "Kimi Delta Attention (kimi_linear)",
}


def build(family: str, device: torch.device, seed: int = 0) -> Any:
    """A causal language model over bytes whose recurrences both remember and forget."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    # Each of its optional kernels that is absent would be a warning.
    logging.set_verbosity_error()

    config = AutoConfig.for_model(FAMILIES[family], **{**_COMMON, **_CONFIGS[FAMILIES[family]]})
    model = AutoModelForCausalLM.from_config(config).to(torch.float32).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomise(name.rpartition(".")[2], parameter, generator)
    return model.to(device)


def _randomise(name: str, parameter: torch.Tensor, generator: torch.Generator) -> None:
    noise = torch.randn(parameter.shape, generator=generator)
    if name == "A_log":
        parameter.copy_(0.7 * noise)
    elif name == "dt_bias":
        parameter.copy_(noise - 3.0)
    elif parameter.dim() == 1:
        parameter.add_(0.1 * noise)
    else:
        parameter.copy_(noise / math.sqrt(parameter[0].numel()))
