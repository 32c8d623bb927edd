"""Small layers of the three families, random inputs for them, and one way to call any family's ops."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from replayssm.config import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
from replayssm.ops.delta import reference as delta_reference
from replayssm.ops.delta import torch_ops as delta_torch
from replayssm.ops.mamba2 import reference as mamba2_reference
from replayssm.ops.mamba2 import torch_ops as mamba2_torch

NAN = float("nan")
OPS = {
    "mamba2": {"reference": mamba2_reference, "torch": mamba2_torch},
    "delta": {"reference": delta_reference, "torch": delta_torch},
}


@dataclass(frozen=True)
class Case:
    """One small layer; `gates`: "raw" projections with A_log and dt_bias, or "given" log decays and betas."""

    name: str
    spec: LayerSpec
    gates: str = "raw"
    extras: bool = True  # Mamba-2: D, z and dt_bias are there

    @property
    def prefix(self) -> str:
        return "mamba2" if self.spec.family == "mamba2" else "delta"

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("mamba2", Mamba2Spec(num_heads=4, head_dim=5, d_state=8, n_groups=2)),
    Case("mamba2-one-group-plain", Mamba2Spec(num_heads=3, head_dim=4, d_state=6, n_groups=1), extras=False),
    Case("gdn", GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=6)),
    Case("gdn-given-gates", GDNSpec(num_k_heads=3, num_v_heads=3, head_k_dim=8, head_v_dim=4), gates="given"),
    Case("kda-softplus", KDASpec(num_k_heads=3, num_v_heads=3, head_k_dim=8, head_v_dim=6)),
    Case("kda-bounded", KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=8, head_v_dim=6, lower_bound=-5.0)),
    Case("kda-given-gates", KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=6, head_v_dim=8), gates="given"),
)


def random_params(case: Case, generator: torch.Generator) -> dict[str, Any]:
    """Per-head parameters in float64, as keyword arguments of the ops."""
    spec, (heads, _, K) = case.spec, case.spec.state_shape

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    if isinstance(spec, Mamba2Spec):
        extra = normal(heads) if case.extras else None
        return {"A": -normal(heads).exp(), "D": extra, "dt_bias": extra}
    if case.gates == "given":
        return {"A_log": None, "dt_bias": None}
    return {"A_log": normal(heads), "dt_bias": normal(heads, K) if isinstance(spec, KDASpec) else normal(heads)}


def random_tokens(case: Case, tokens: int, generator: torch.Generator) -> dict[str, Any]:
    """Inputs of `tokens` packed tokens in float64; they survive a cast to bfloat16 unchanged."""
    spec, (heads, V, K) = case.spec, case.spec.state_shape

    def normal(*shape: int) -> torch.Tensor:
        values = torch.randn(tokens, *shape, generator=generator, dtype=torch.float64)
        return values.bfloat16().double()

    if isinstance(spec, Mamba2Spec):
        B, C = normal(spec.n_groups, K), normal(spec.n_groups, K)
        z = normal(heads, V) if case.extras else None
        return {"x": normal(heads, V), "dt": normal(heads), "B": B, "C": C, "z": z}
    g = normal(heads, K) if isinstance(spec, KDASpec) else normal(heads)
    beta = normal(heads)
    if case.gates == "given":
        g, beta = -g.exp(), beta.sigmoid()
    k_shape = (spec.num_k_heads, K)
    return {"q": normal(*k_shape), "k": normal(*k_shape), "v": normal(heads, V), "g": g, "beta": beta}


ORDER = {
    "mamba2": ("x", "dt", "A", "B", "C", "D", "z", "dt_bias"),
    "delta": ("q", "k", "v", "g", "beta", "A_log", "dt_bias"),
}
RINGS = {"mamba2": ("x", "B", "dt"), "delta": ("k", "v", "u", "g", "beta")}
REPLAYED = {"mamba2": ("x", "B", "dt"), "delta": ("k", "v", "g", "beta")}
EXACT = {"dt", "g", "beta", "A", "D", "dt_bias", "A_log"}


def cast(values: dict[str, Any], dtype: torch.dtype, precise: torch.dtype = torch.float32) -> dict[str, Any]:
    """Activations to `dtype`, gates and parameters to `precise`."""
    return {n: None if v is None else v.to(precise if n in EXACT else dtype) for n, v in values.items()}


def op_options(case: Case) -> dict[str, Any]:
    if isinstance(case.spec, Mamba2Spec):
        return {"dt_softplus": True}
    bound = case.spec.lower_bound if isinstance(case.spec, KDASpec) else None
    return {"scale": case.spec.head_k_dim**-0.5, "use_qk_l2norm": True, "lower_bound": bound}


def ordered_inputs(case: Case, inputs: dict[str, Any]) -> list[Any]:
    return [inputs[name] for name in ORDER[case.prefix]]


def new_output(case: Case, tokens: int, dtype: torch.dtype) -> torch.Tensor:
    heads, V, _ = case.spec.state_shape
    return torch.full((tokens, heads, V), NAN, dtype=dtype)


def run_step(
    case: Case, backend: str, inputs: dict[str, Any], state: torch.Tensor, ring: dict[str, torch.Tensor], **rows: Any
) -> torch.Tensor:
    """One window step. rows: cursors, slot_indices, query_start_loc, buffer_len, pad_slot_id, max_window_len."""
    args = ordered_inputs(case, inputs)
    out = new_output(case, len(args[0]), args[0].dtype)
    rings = [ring[name] for name in RINGS[case.prefix]]
    positional = [rows.pop(name) for name in ("cursors", "slot_indices", "query_start_loc")]
    step = getattr(OPS[case.prefix][backend], f"{case.prefix}_step")
    step(*args, state, *rings, *positional, out, **rows, **op_options(case))
    return out


def run_stepwise(
    case: Case,
    backend: str,
    inputs: dict[str, Any],
    state: torch.Tensor,
    slot_indices: torch.Tensor,
    query_start_loc: torch.Tensor | None = None,
    pad_slot_id: int = -1,
    max_window_len: int = 1,
) -> torch.Tensor:
    """Ordinary decoding of the same tokens."""
    args = ordered_inputs(case, inputs)
    out = new_output(case, len(args[0]), args[0].dtype)
    stepwise = getattr(OPS[case.prefix][backend], f"{case.prefix}_stepwise")
    options = {"pad_slot_id": pad_slot_id, "max_window_len": max_window_len, **op_options(case)}
    stepwise(*args, state, slot_indices, query_start_loc, out, **options)
    return out


def run_materialize(
    case: Case,
    backend: str,
    A: torch.Tensor | None,
    state: torch.Tensor,
    ring: dict[str, torch.Tensor],
    cursors: torch.Tensor,
    slot_indices: torch.Tensor,
    num_tokens: torch.Tensor | None,
    dst: torch.Tensor,
    dst_indices: torch.Tensor,
    pad_slot_id: int = -1,
) -> None:
    rings = [ring[name] for name in REPLAYED[case.prefix]]
    head = [A] if case.prefix == "mamba2" else []
    options = {} if case.prefix == "mamba2" else {"use_qk_l2norm": True}
    materialize = getattr(OPS[case.prefix][backend], f"{case.prefix}_materialize")
    materialize(
        *head, state, *rings, cursors, slot_indices, num_tokens, dst, dst_indices, pad_slot_id=pad_slot_id, **options
    )


def poisoned_ring(case: Case, num_slots: int, ring_len: int, dtype: torch.dtype, poison: float = NAN) -> dict[str, Any]:
    """Rings full of `poison`; gate fields are fp32, or float64 where activations are."""
    precise = torch.promote_types(dtype, torch.float32)
    ring = {}
    for name, field in case.spec.ring_fields.items():
        dims = () if field.dim is None else (field.dim,)
        ring[name] = torch.full(
            (num_slots, field.heads, ring_len, *dims), poison, dtype=precise if field.dtype else dtype
        )
    return ring


def relative_error(value: torch.Tensor, expected: torch.Tensor) -> float:
    """norm(value - expected) / norm(expected); NaN never passes a comparison."""
    scale = expected.double().norm().item()
    return (value.double() - expected.double()).norm().item() / max(scale, 1e-30)
