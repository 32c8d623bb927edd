"""The accuracy laboratory's recurrences against a plain float64 loop and the library's own caches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from families import relative_error

from replayssm import GDNSpec, KDASpec, Mamba2Spec, Plan, ReplayCache, delta_decode, mamba2_decode
from replayssm.drift.forward import delta_inputs, mamba2_inputs
from replayssm.drift.scan import scan
from replayssm.drift.variants import NOISE, REFERENCE, Variant
from replayssm.drift.windows import LayerInputs, make_windows

FAMILIES = ("mamba2", "gdn", "kda")


def raw_inputs(family: str, tokens: int) -> dict[str, torch.Tensor]:
    """What a layer gives its recurrence; decays from 2 to thousands of tokens, and KDA's also far stronger."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).float()

    if family == "mamba2":
        A = -torch.exp(torch.linspace(-6, 0, 4, dtype=torch.float64)).float()
        dt = torch.nn.functional.softplus(normal(tokens, 4) - 2)
        D = normal(4)
        return {
            "x": normal(tokens, 4, 6),
            "dt": dt,
            "A": A,
            "B": normal(tokens, 2, 32),
            "C": normal(tokens, 2, 32),
            "D": D,
        }
    rate = torch.exp(normal(tokens, 4, 32) - 4) if family == "kda" else torch.exp(normal(tokens, 4) - 4)
    if family == "kda":
        rate[::7, :, ::5] = 60.0
    heads = 4 if family == "kda" else 2
    q, k = normal(tokens, heads, 32), normal(tokens, heads, 32)
    return {"q": q, "k": k, "v": normal(tokens, 4, 6), "g": -rate, "beta": torch.sigmoid(normal(tokens, 4))}


def layer_inputs(family: str, raw: dict[str, torch.Tensor]) -> LayerInputs:
    return mamba2_inputs(**raw) if family == "mamba2" else delta_inputs(**raw)


def in_float64(inputs: LayerInputs) -> LayerInputs:
    return LayerInputs(**{name: None if value is None else value.double() for name, value in vars(inputs).items()})


def plain_loop(inputs: LayerInputs) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and last state, token by token as the recurrence is written down."""
    state = inputs.v.new_zeros(*inputs.v.shape[1:], inputs.k.shape[2])
    outputs = []
    for t in range(len(inputs.q)):
        state = state * inputs.g[t, :, None].exp()
        u = inputs.v[t]
        if inputs.beta is not None:
            u = inputs.beta[t, :, None] * (u - (state * inputs.k[t, :, None]).sum(-1))
        state = state + u[..., None] * inputs.k[t, :, None]
        outputs.append((state * inputs.q[t, :, None]).sum(-1))
    out = torch.stack(outputs)
    return (out if inputs.skip is None else out + inputs.skip), state


@pytest.mark.parametrize("variant", [REFERENCE, NOISE, "none/fp32", "none/fp32@64"])
@pytest.mark.parametrize("family", FAMILIES)
def test_scans_equal_a_plain_loop_in_float64(family: str, variant: str) -> None:
    tokens = 256
    inputs = in_float64(layer_inputs(family, raw_inputs(family, tokens)))
    expected, state = plain_loop(inputs)
    found = scan(Variant.parse(variant), inputs, [tokens])
    # A window sums at most 64 decays; each of the two ways rounds every operation once.
    assert relative_error(found.outputs, expected) < 1e-13
    assert relative_error(found.states[tokens], state) < 1e-13


@pytest.mark.parametrize("family", FAMILIES)
def test_strong_decays_make_no_infinity(family: str) -> None:
    raw = raw_inputs(family, 64)
    raw["A" if family == "mamba2" else "g"].fill_(-300.0)
    windows = make_windows(layer_inputs(family, raw), 16)
    assert all(torch.isfinite(t).all() for t in windows.tensors())


def through_the_library(
    family: str, raw: dict[str, torch.Tensor], variant: Variant
) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs and last state of the same tokens decoded one by one in a ReplayCache."""
    spec: Any = {
        "mamba2": Mamba2Spec(num_heads=4, head_dim=6, d_state=32, n_groups=2),
        "gdn": GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=32, head_v_dim=6),
        "kda": KDASpec(num_k_heads=4, num_v_heads=4, head_k_dim=32, head_v_dim=6),
    }[family]
    options: dict[str, Any] = {"read": variant.read, "checkpoint": variant.checkpoint}
    options |= {"buffer_len": variant.buffer_len, "rounding": variant.option or "nearest"}
    cache = ReplayCache(Plan((spec,), activation=torch.float32, **options), 1)
    outputs = []
    for t in range(len(next(iter(raw.values())))):
        now = {name: value if value.dim() == 1 else value[t : t + 1] for name, value in raw.items()}
        step = cache.begin_step([0])
        if family == "mamba2":
            outputs.append(mamba2_decode(cache.layer(0), step, **now, dt_softplus=False))
        else:
            outputs.append(delta_decode(cache.layer(0), step, **now))
        cache.commit(step)
    return torch.cat(outputs), cache.materialize(0, [0])[0]


@pytest.mark.parametrize(
    "variant",
    [
        "none/fp32",
        "none/bf16",
        "none/bf16:stochastic",
        "none/fp8",
        "none/fp8:stochastic",
        "bf16/fp32",
        "int8/fp32",
        "fp8/fp32",
        "nvfp4/fp32",
        "nvfp4/bf16@8",
    ],
)
@pytest.mark.parametrize("family", FAMILIES)
def test_scans_equal_the_librarys_decoding(family: str, variant: str) -> None:
    tokens, chosen = 64, Variant.parse(variant)
    raw = raw_inputs(family, tokens)
    inputs = layer_inputs(family, raw)
    expected, state = through_the_library(family, raw, chosen)
    found = scan(chosen, inputs, [tokens])
    exact, exact_state = plain_loop(in_float64(inputs))
    # Where fp32 noise moves a value over the border between two codes, the two differ by one step there; so they may
    # differ by a small part of what the formats themselves cost.
    assert relative_error(found.outputs, expected) < 2e-5 + 0.1 * relative_error(expected, exact)
    rounding = 0.0 if chosen.checkpoint == "fp32" else relative_error(state, exact_state)
    # The scan rounds after its last window, the library when the next one flushes.
    if chosen.option != "stochastic":
        assert relative_error(found.states[tokens], chosen.round_checkpoint(state)) < 2e-5 + 0.1 * rounding
