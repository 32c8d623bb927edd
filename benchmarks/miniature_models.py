"""The miniatures: byte-level models in the real architectures, real head sizes, few heads and layers."""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator
from typing import Any

import torch
from miniature_scans import delta_scan, mamba2_scan
from torch import nn

from replayssm.drift.local_attention import register

_COMMON: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 192,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 131072,
    "attention_window": 128,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": True,
}
_LINEAR, _FULL = "linear_attention", "full_attention"
_CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "mamba2": (
        "nemotron_h",
        {
            "layers_block_type": [_LINEAR, "mlp", _LINEAR, _FULL, "mlp", _LINEAR, "mlp", _LINEAR],
            "intermediate_size": 768,
            "head_dim": 32,
            "mamba_num_heads": 8,
            "mamba_head_dim": 64,
            "ssm_state_size": 128,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 64,
            "time_step_min": 1e-20,  # transformers clamps prefills to it, but not decoding
        },
    ),
    "gdn": (
        "qwen3_5_text",
        {
            "num_hidden_layers": 4,
            "layer_types": [_LINEAR, _FULL, _LINEAR, _LINEAR],
            "intermediate_size": 512,
            "head_dim": 32,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4,
        },
    ),
    "kda": (
        "kimi_linear",
        {
            "num_hidden_layers": 4,
            "layer_types": [_LINEAR, _FULL, _LINEAR, _LINEAR],
            "mlp_layer_types": ["dense"] * 4,
            "intermediate_size": 448,
            "num_key_value_heads": 4,
            "linear_num_heads": 3,
            "linear_head_dim": 128,
            "linear_conv_kernel_dim": 4,
            "kv_lora_rank": 64,
            "qk_nope_head_dim": 32,
            "qk_rope_head_dim": 16,
            "v_head_dim": 32,
        },
    ),
}
FAMILIES = tuple(_CONFIGS)
_HALF_LIVES = (16.0, 32768.0)  # tokens: the range over which decays start
_DELTA_BIAS = -4.0  # where softplus is nearly exponential, so that gates can reach far both ways


def build(family: str, seed: int) -> Any:
    """A causal language model over bytes, ready to train."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()
    torch.manual_seed(seed)
    architecture, options = _CONFIGS[family]
    config = AutoConfig.for_model(architecture, **{**_COMMON, **options})
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register()).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02 if isinstance(module, nn.Embedding) else 0.5 / math.sqrt(192))
        _set_decays(model, family, generator)
    return model


def _set_decays(model: Any, family: str, generator: torch.Generator) -> None:
    """Half-lives at an input of zero: spread evenly in their logarithm over the heads (KDA: the channels)."""
    named = dict(model.named_parameters())
    for name, A_log in named.items():
        if not name.endswith("A_log"):
            continue
        dt_bias = named[name.removesuffix("A_log") + "dt_bias"]
        heads = A_log.numel()
        places = (torch.arange(dt_bias.numel()) + torch.rand(dt_bias.numel(), generator=generator)) / dt_bias.numel()
        low, high = (math.log(x) for x in _HALF_LIVES)
        if family == "kda":  # each head spans the whole range over its channels
            places = places.view(heads, -1)[:, torch.randperm(dt_bias.numel() // heads, generator=generator)]
            places = (places * heads) % 1.0
        decay = math.log(2) / torch.exp(low + (high - low) * places)
        if family == "mamba2":
            dt = torch.exp(torch.empty(heads).uniform_(math.log(0.01), math.log(0.1), generator=generator))
            dt_bias.copy_(dt + torch.log(-torch.expm1(-dt)))
            A_log.copy_(torch.log(decay / dt))
        elif family == "gdn":
            dt_bias.fill_(_DELTA_BIAS)
            A_log.copy_(torch.log(decay / math.log1p(math.exp(_DELTA_BIAS))))
        else:
            A_log.fill_(0.0)
            decay = decay.flatten()
            dt_bias.copy_(decay + torch.log(-torch.expm1(-decay)))


class Carry:
    """Routes a model's SSM layers through the training scans and hands their states from one call to the next."""

    def __init__(self, model: Any) -> None:
        self._modules = {sys.modules[type(m).__module__] for m in model.modules() if hasattr(m, "conv1d")}
        self.states: list[torch.Tensor] = []
        self._before: list[torch.Tensor] = []

    @contextlib.contextmanager
    def routed(self) -> Iterator[None]:
        """While this is open, calls without a cache run the scans; training of one model a process."""
        names = {
            "torch_chunk_gated_delta_rule": self._delta,
            "chunk_kimi_delta_attention": self._delta,
            "mamba2_chunk_scan": self._mamba2,
        }
        taken = [(m, name, getattr(m, name)) for m in self._modules for name in names if hasattr(m, name)]
        for module, name, _ in taken:
            setattr(module, name, names[name])
        try:
            yield
        finally:
            for module, name, original in taken:
                setattr(module, name, original)

    def begin(self, keep: torch.Tensor | None) -> None:
        """Before a call: continue the rows [B] that `keep` names (None: none) from the states of the last one."""
        self._before = [] if keep is None else [s.detach() * keep.view(-1, *[1] * (s.dim() - 1)) for s in self.states]
        self.states = []

    def _take(self) -> torch.Tensor | None:
        return self._before[len(self.states)] if self._before else None

    def _delta(self, query: Any, key: Any, value: Any, g: Any, beta: Any, **_: Any) -> Any:
        repeats = value.shape[2] // key.shape[2]
        if repeats > 1:
            query, key = (t.repeat_interleave(repeats, dim=2) for t in (query, key))
        with torch.autocast(value.device.type, enabled=False):
            out, state = delta_scan(query, key, value, g, beta, self._take())
        self.states.append(state)
        return out.to(value.dtype), None

    def _mamba2(self, x: Any, dt: Any, A: Any, B: Any, C: Any, *, D: Any, dt_bias: Any, **_: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            out, state = mamba2_scan(x, nn.functional.softplus(dt.float() + dt_bias), A, B, C, self._take())
            out = out + D[:, None] * x.float()
        self.states.append(state)
        return out.to(x.dtype)
