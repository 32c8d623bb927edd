"""What the plugin serves and what it refuses: decided when vLLM is configured, before a weight is loaded."""

from __future__ import annotations

import functools
from dataclasses import asdict
from typing import Any

from replayssm.checks import ReplayError, check_choice, fail
from replayssm.integrations.vllm.options import KEY, chosen_options

VERSIONS = ("0.32", "0.33")
DRAFTS = (None, "ngram", "ngram_gpu", "mtp")
DRAFTS_SERVED = "drafts are served on a GPU, without a draft model of its own state"
CACHE_MODES = "prefix caching keeps states at the ends of blocks; not with drafts: use --no-enable-prefix-caching"
RUNNER = "with drafts model runner V1 can lose what was accepted: leave VLLM_USE_V2_MODEL_RUNNER unset"
PREFILLS = ("auto", "flashkda", "triton")
ARCHITECTURES = (
    *("AliceAIForCausalLM", "BailingMoeV3ForCausalLM", "BailingMoeV3VLForConditionalGeneration"),
    *("FalconH1ForCausalLM", "Glm5NextForCausalLM", "Glm5NextForConditionalGeneration", "GraniteMoeHybridForCausalLM"),
    *("InternS2MobiusForConditionalGeneration", "InternS2PreviewForConditionalGeneration"),
    *("KimiK3ForConditionalGeneration", "KimiLinearForCausalLM", "Mamba2ForCausalLM"),
    *("NemotronHForCausalLM", "NemotronHPuzzleForCausalLM", "NemotronH_Nano_VL_V2", "NemotronH_Omni_Reasoning_V3"),
    *("NemotronH_Nano_Omni_Reasoning_V3", "NemotronH_Super_Omni_Reasoning_V3", "OlmoHybridForCausalLM"),
    *("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3_5ForConditionalGeneration"),
    *("Qwen3_5MoeForConditionalGeneration", "Zamba2ForCausalLM"),
)
NOT_SERVED = {
    "BailingMoeV2_5ForCausalLM": "its linear attention has no delta rule",
    "Qwen4ExpForCausalLM": "its pages hold states of two kinds",
    "Qwen4ExpForConditionalGeneration": "its pages hold states of two kinds",
}


def check_when_configured() -> None:
    """Let every `VllmConfig` that asks for the plugin be checked when it is made."""
    from vllm.config import VllmConfig

    original = VllmConfig.__post_init__
    if hasattr(original, "__wrapped__"):
        return

    @functools.wraps(original)
    def checked(config: Any) -> None:
        original(config)
        model = config.model_config
        options = None if model is None else chosen_options(config.additional_config)
        if options is not None and model.runner_type != "draft":
            check_supported(config)
            # vLLM finds compiled models by a hash of its configuration, which the environment is no part of.
            if isinstance(config.additional_config, dict):
                config.additional_config = {**config.additional_config, KEY: asdict(options)}

    VllmConfig.__post_init__ = checked


def check_supported(config: Any) -> None:
    """Raise ReplayError for the first thing in vLLM's configuration that the plugin does not serve."""
    import vllm

    check_version(vllm.__version__)
    architecture = config.model_config.architecture
    if architecture in NOT_SERVED:
        raise ReplayError(f"{architecture} is not served with replayssm: {NOT_SERVED[architecture]}")
    check_choice("architecture with replayssm", architecture, ARCHITECTURES)
    for name, value, allowed, why in _limits(config):
        if value not in allowed:
            raise ReplayError(f"{name} is {value!r}; allowed with replayssm: {', '.join(map(str, allowed))} ({why})")


def check_version(version: str) -> None:
    """Raise unless this vLLM is one whose layers the plugin knows."""
    if ".".join(version.split(".")[:2]) not in VERSIONS:
        raise fail("the version of vllm", version, " and ".join(f"{v}.*" for v in VERSIONS))


def _limits(config: Any) -> list[tuple[str, Any, tuple[Any, ...], str]]:
    """(what, its value, values served, why not the others)."""
    cache, drafts = config.cache_config, getattr(config.speculative_config, "method", None)
    served = (None,) if config.device_config.device_type == "cpu" else DRAFTS
    extra = config.additional_config if isinstance(config.additional_config, dict) else {}
    return [
        ("mamba_cache_mode", cache.mamba_cache_mode, ("none",) if drafts else ("none", "align"), CACHE_MODES),
        ("use_replayssm", cache.use_replayssm, (False,), "vLLM's own replay of the same layers"),
        ("kv_transfer_config", config.kv_transfer_config, (None,), "a connector moves states without rings"),
        ("speculative_config.method", drafts, served, DRAFTS_SERVED),
        ("use_v2_model_runner with drafts", drafts is None or config.use_v2_model_runner, (True,), RUNNER),
        ("decode_backend", extra.get("decode_backend", "auto"), ("auto",), "the other passes the layers by"),
        ("kda_prefill_backend", extra.get("kda_prefill_backend", "auto"), PREFILLS, "FlashInfer's wants rows listed"),
        ("enable_dbo", config.parallel_config.enable_dbo, (False,), "the cursors of a step belong to one batch"),
        (
            "enable_stochastic_rounding",
            config.mamba_config.enable_stochastic_rounding,
            (False,),
            "a checkpoint is rounded to the nearest, once a window",
        ),
    ]
