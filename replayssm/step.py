"""One step of one layer: append a window of tokens to the ring and compute their outputs.

One token a row is decoding; more is verification of drafts, a chain or a tree. The same call serves all, and rows
may differ. A layer takes each step once: a row that flushes replays its ring in it.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from replayssm.checks import check_choice, check_tensor, check_written, fail
from replayssm.config import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
from replayssm.cursors import Step
from replayssm.layer import LayerCache

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def mamba2_decode(
    layer: LayerCache,
    step: Step,
    x: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = True,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs [num_tokens, num_heads, head_dim] of a Mamba-2 layer, in the activation dtype; padding rows give zeros.

    x, z [num_tokens, num_heads, head_dim]; dt [num_tokens, num_heads]; B, C [num_tokens, n_groups, d_state]; A
    (negative; fp32), D, dt_bias [num_heads]. x, B, C, z in the plan's activation dtype, with any token and head
    stride; the others contiguous along the heads. `y = S C + D x`, times `silu(z)` if z is given. Raises ReplayError
    before anything is written.
    """
    spec = _spec(layer, step)
    if not isinstance(spec, Mamba2Spec):
        raise fail("layer", f"a {spec.family} layer", "a mamba2 layer")
    tokens, act, device = _num_tokens(step, x), layer.ring["x"].dtype, layer.state.device
    check_tensor("x", x, (tokens, spec.num_heads, spec.head_dim), (act,), device)
    check_tensor("dt", dt, (tokens, spec.num_heads), FLOATS, device)
    for name, value in (("B", B), ("C", C)):
        check_tensor(name, value, (tokens, spec.n_groups, spec.d_state), (act,), device)
    if z is not None:
        check_tensor("z", z, (tokens, spec.num_heads, spec.head_dim), (act,), device)
    check_tensor("A", A, (spec.num_heads,), (torch.float32, torch.float64), device)
    for name, param in (("D", D), ("dt_bias", dt_bias)):
        if param is not None:
            check_tensor(name, param, (spec.num_heads,), FLOATS, device)
    check_choice("dt_softplus", dt_softplus, (True, False))
    out = _output(out, x, (tokens, spec.num_heads, spec.head_dim))
    layer.A = A
    _run(layer, step, (x, dt, A, B, C, D, z, dt_bias), out, {"dt_softplus": dt_softplus})
    return out


def delta_decode(
    layer: LayerCache,
    step: Step,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    *,
    A_log: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    scale: float | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Outputs [num_tokens, num_v_heads, head_v_dim] of a GDN or KDA layer; padding rows give zeros.

    q, k [num_tokens, num_k_heads, head_k_dim] (before the L2 norm) and v [num_tokens, num_v_heads, head_v_dim] in the
    plan's activation dtype, with any token and head stride. g [num_tokens, num_v_heads] (KDA: and head_k_dim) and
    beta [num_tokens, num_v_heads] are the log decay and beta themselves if A_log is None; else raw projections, which
    A_log [num_v_heads] and dt_bias [num_v_heads] (KDA: and head_k_dim) turn into them (`replayssm.ops.delta.gates`).
    scale multiplies q; default `head_k_dim ** -0.5`. Raises ReplayError before anything is written.
    """
    spec = _spec(layer, step)
    if not isinstance(spec, GDNSpec):
        raise fail("layer", f"a {spec.family} layer", "a gdn or kda layer")
    tokens, act, device = _num_tokens(step, q), layer.ring["k"].dtype, layer.state.device
    for name, value in (("q", q), ("k", k)):
        check_tensor(name, value, (tokens, spec.num_k_heads, spec.head_k_dim), (act,), device)
    check_tensor("v", v, (tokens, spec.num_v_heads, spec.head_v_dim), (act,), device)
    _check_gates(spec, tokens, device, g, beta, A_log, dt_bias)
    if scale is not None and not (isinstance(scale, (int, float)) and math.isfinite(scale)):
        raise fail("scale", scale, "None, or a finite number")
    out = _output(out, v, (tokens, spec.num_v_heads, spec.head_v_dim))
    options = {
        "scale": spec.head_k_dim**-0.5 if scale is None else scale,
        "use_qk_l2norm": spec.use_qk_l2norm,
        "lower_bound": spec.lower_bound if isinstance(spec, KDASpec) else None,
    }
    _run(layer, step, (q, k, v, g, beta, A_log, dt_bias), out, options)
    return out


def _check_gates(
    spec: GDNSpec,
    tokens: int,
    device: torch.device,
    g: torch.Tensor,
    beta: torch.Tensor,
    A_log: torch.Tensor | None,
    dt_bias: torch.Tensor | None,
) -> None:
    gate = (spec.num_v_heads, spec.head_k_dim) if isinstance(spec, KDASpec) else (spec.num_v_heads,)
    check_tensor("g", g, (tokens, *gate), FLOATS, device, inner_contiguous=len(gate) - 1)
    check_tensor("beta", beta, (tokens, spec.num_v_heads), FLOATS, device, inner_contiguous=0)
    if A_log is not None:
        check_tensor("A_log", A_log, (spec.num_v_heads,), FLOATS, device)
    if dt_bias is not None:
        if A_log is None:
            raise fail("dt_bias", "given without A_log", "both, or neither where g is the log decay already")
        check_tensor("dt_bias", dt_bias, gate, FLOATS, device, inner_contiguous=len(gate))


def _run(
    layer: LayerCache,
    step: Step,
    inputs: tuple[torch.Tensor | None, ...],
    out: torch.Tensor,
    options: dict[str, Any],
) -> None:
    """Run the family's op; a stepwise step leaves the ring out."""
    rows = (step.slot_indices, step.query_start_loc, out)
    common = {"pad_slot_id": step.pad_slot_id, "max_window_len": step.max_window_len, **options}
    if step.stepwise:
        formats = {} if layer.state_scales is None else {"state_scales": layer.state_scales}
        layer.ops.stepwise(*inputs, layer.state, *rows, **common, **formats)
        return
    rings = (layer.ring[name] for name in layer.spec.ring_fields)
    common |= {"buffer_len": step.buffer_len, "parents": step.parents, **layer.op_formats()}
    if step.buffer_len < layer.buffer_len:
        common["max_committed"] = layer.buffer_len  # a lowered limit may find more rows than it allows
    layer.ops.step(*inputs, layer.state, *rings, layer.cursors, *rows, **common)


def _spec(layer: LayerCache, step: Step) -> LayerSpec:
    for name, value, kind in (("layer", layer, LayerCache), ("step", step, Step)):
        if not isinstance(value, kind):
            raise fail(name, type(value).__name__, f"a {kind.__name__} of a ReplayCache")
    return layer.spec


def _num_tokens(step: Step, x: torch.Tensor) -> int:
    """Tokens of the step; where only the device knows, those of the input."""
    return step.num_tokens if step.num_tokens >= 0 else x.shape[0]


def _output(out: torch.Tensor | None, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    if out is None:
        return torch.empty(shape, dtype=like.dtype, device=like.device)
    check_tensor("out", out, shape, (like.dtype,), like.device)
    check_written("out", out)
    return out
