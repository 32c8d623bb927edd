"""A vLLM plugin: Mamba-2, Gated DeltaNet and KDA layers of an unmodified vLLM decode through checkpoint and ring.

vLLM finds `register` by its entry point, in every process. It only offers the layers; they do what vLLM's own do
until the option "replayssm" asks for more (see `options`).
"""

from __future__ import annotations


def register() -> None:
    """Entry point of the group `vllm.general_plugins`; may be called more than once."""
    from replayssm.integrations.vllm.support import check_when_configured

    check_when_configured()
    _offer_layers()


def _offer_layers() -> None:
    """Let vLLM build our subclasses of its layers."""
    from vllm.model_executor.custom_op import op_registry_oot
    from vllm.model_executor.layers.mamba.gdn.kimi_gdn_linear_attn import KimiGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    from replayssm.integrations.vllm.gdn import ReplayGatedDeltaNet
    from replayssm.integrations.vllm.kda import ReplayKimiDelta
    from replayssm.integrations.vllm.mamba2 import ReplayMambaMixer2

    ours = (
        (QwenGatedDeltaNetAttention, ReplayGatedDeltaNet),
        (KimiGatedDeltaNetAttention, ReplayKimiDelta),
        (MambaMixer2, ReplayMambaMixer2),
    )
    for base, layer in ours:
        if op_registry_oot.get(base.__name__) is not layer:
            base.register_oot(name=base.__name__)(layer)
