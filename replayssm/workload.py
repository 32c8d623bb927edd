"""Random layers' inputs with the decays of real models, for `replayssm check` and `replayssm bench`."""

from __future__ import annotations

from typing import Any

import torch

from replayssm.config import KDASpec, LayerSpec, Mamba2Spec


def random_parameters(spec: LayerSpec, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """fp32 parameters on the CPU: A in -[1, 16] and time steps of 0.001 to 0.1, as models are initialised."""
    heads, _, K = spec.state_shape
    rate = torch.empty(heads).uniform_(1.0, 16.0, generator=generator)
    shape = (heads, K) if isinstance(spec, KDASpec) else (heads,)
    time_step = torch.exp(torch.empty(shape).uniform_(-6.9, -2.3, generator=generator))
    bias = time_step + torch.log(-torch.expm1(-time_step))  # softplus(bias) is the time step
    if isinstance(spec, Mamba2Spec):
        return {"A": -rate, "D": torch.randn(heads, generator=generator), "dt_bias": bias}
    if isinstance(spec, KDASpec) and spec.lower_bound is not None:
        return {"A_log": torch.zeros(heads), "dt_bias": torch.empty(shape).uniform_(-8.0, -2.0, generator=generator)}
    return {"A_log": rate.log(), "dt_bias": bias}


def random_inputs(
    spec: LayerSpec, tokens: int, activation: torch.dtype, generator: torch.Generator
) -> dict[str, torch.Tensor]:
    """Inputs of `tokens` packed tokens on the CPU; what the convolution makes are views of one packed tensor."""
    heads, V, K = spec.state_shape
    groups = spec.n_groups if isinstance(spec, Mamba2Spec) else spec.num_k_heads
    packed = torch.randn(tokens, 2 * groups * K + heads * V, generator=generator).to(activation)
    first, second, values = packed.split([groups * K, groups * K, heads * V], dim=-1)
    first, second, values = first.view(-1, groups, K), second.view(-1, groups, K), values.view(-1, heads, V)

    def gate(*shape: int) -> torch.Tensor:
        return torch.randn(tokens, *shape, generator=generator).to(activation)

    if isinstance(spec, Mamba2Spec):
        return {"x": values, "dt": gate(heads), "B": first, "C": second}
    g = gate(heads, K) if isinstance(spec, KDASpec) else gate(heads)
    return {"q": first, "k": second, "v": values, "g": g, "beta": gate(heads)}


def positional(spec: LayerSpec, inputs: dict[str, torch.Tensor]) -> tuple[Any, ...]:
    """Inputs and parameters in the order in which the family's ops take them."""
    names = (
        ("x", "dt", "A", "B", "C", "D", "z", "dt_bias")
        if isinstance(spec, Mamba2Spec)
        else ("q", "k", "v", "g", "beta", "A_log", "dt_bias")
    )
    return tuple(inputs.get(name) for name in names)


def op_options(spec: LayerSpec) -> dict[str, Any]:
    """The options of the family's step and stepwise ops."""
    if isinstance(spec, Mamba2Spec):
        return {"dt_softplus": True}
    return {
        "scale": spec.head_k_dim**-0.5,
        "use_qk_l2norm": spec.use_qk_l2norm,
        "lower_bound": spec.lower_bound if isinstance(spec, KDASpec) else None,
    }
