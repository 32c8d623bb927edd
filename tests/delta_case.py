"""Random GDN and KDA batches as engines pass them: packed, in padded pages and shuffled slots, NaN where unowned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from replayssm.cursors import NO_LIMIT, NUM_COMMITTED, RING_START, WINDOW_LIMIT, flush_mask
from replayssm.ops.delta import reference

NAN = float("nan")
RINGS = ("ring_k", "ring_v", "ring_u", "ring_g", "ring_beta")
PAD = -1
Tensors = dict[str, Any]


@dataclass(frozen=True)
class Dims:
    """A layer, its ring and dtypes."""

    num_k_heads: int = 1
    num_v_heads: int = 2
    head_k_dim: int = 16
    head_v_dim: int = 8
    kda: bool = False
    buffer_len: int = 4
    ring_len: int = 5
    act: torch.dtype = torch.float32
    checkpoint: torch.dtype = torch.float32
    raw: bool = True  # raw gates, turned into decays by A_log and dt_bias
    bias: bool = True
    lower_bound: float | None = None
    l2norm: bool = True
    page: int = 0  # bytes between slots (and heads) that belong to others, a multiple of 16

    @property
    def gate(self) -> tuple[int, ...]:
        return (self.num_v_heads, self.head_k_dim) if self.kda else (self.num_v_heads,)


def paged(shape: tuple[int, ...], dtype: torch.dtype, page: int, device: torch.device | str) -> torch.Tensor:
    """A NaN tensor whose slots and heads lie `page` bytes apart from each other."""
    gap, inner = page // dtype.itemsize, math.prod(shape[2:])
    head, slot = inner + gap, shape[1] * (inner + gap) + 3 * gap
    whole = torch.full((shape[0] * slot,), NAN, dtype=dtype, device=device)
    return whole.as_strided(shape, (slot, head, *torch.empty(shape[2:], device="meta").stride()))


def new_tokens(dims: Dims, batch: int, generator: torch.Generator, device: torch.device | str) -> Tensors:
    """One token a row: q, k, v are views of one packed tensor, g and beta of another."""
    widths = (dims.num_k_heads * dims.head_k_dim,) * 2 + (dims.num_v_heads * dims.head_v_dim, 8)
    packed = torch.randn(batch, sum(widths), generator=generator)
    if not dims.l2norm:
        packed[:, : 2 * widths[0]] *= dims.head_k_dim**-0.5
    q, k, v, _ = packed.to(device, dims.act).split(widths, 1)
    g = torch.randn(batch, *dims.gate, generator=generator)
    beta = torch.randn(batch, dims.num_v_heads, generator=generator)
    if dims.raw:
        g, beta = g.to(dims.act), beta.to(dims.act)
    else:
        g, beta = -g.abs(), beta.sigmoid()
    heads = (dims.num_k_heads, dims.head_k_dim)
    values = v.view(batch, dims.num_v_heads, dims.head_v_dim)
    return {
        "q": q.view(batch, *heads),
        "k": k.view(batch, *heads),
        "v": values,
        "g": g.to(device),
        "beta": beta.to(device),
    }


def new_layer(dims: Dims, num_slots: int, generator: torch.Generator, device: torch.device | str) -> Tensors:
    """Parameters, and a pool in which nothing is owned yet."""
    HK, HV, K, V, R = dims.num_k_heads, dims.num_v_heads, dims.head_k_dim, dims.head_v_dim, dims.ring_len
    gates = (num_slots, HV, R, K) if dims.kda else (num_slots, HV, R)

    def pool(*shape: int, dtype: torch.dtype) -> torch.Tensor:
        return paged(shape, dtype, dims.page, device)

    return {
        "A_log": (torch.randn(HV, generator=generator) - 1).to(device) if dims.raw else None,
        "dt_bias": torch.randn(dims.gate, generator=generator).to(device) if dims.raw and dims.bias else None,
        "state": pool(num_slots, HV, V, K, dtype=dims.checkpoint),
        "ring_k": pool(num_slots, HK, R, K, dtype=dims.act),
        "ring_v": pool(num_slots, HV, R, V, dtype=dims.act),
        "ring_u": pool(num_slots, HV, R, V, dtype=dims.act),
        "ring_g": pool(*gates, dtype=torch.float32),
        "ring_beta": pool(num_slots, HV, R, dtype=torch.float32),
        "cursors": torch.zeros(num_slots, 4, dtype=torch.int32, device=device),
    }


def own(
    layer: Tensors, dims: Dims, slots: list[int], generator: torch.Generator, limits: list[int] | None = None
) -> None:
    """Give slots a random state, an empty ring that starts anywhere, and a limit of their first window."""
    for i, slot in enumerate(slots):
        state = torch.randn(layer["state"].shape[1:], generator=generator)
        layer["state"][slot] = state.to(layer["state"])
        layer["cursors"][slot, RING_START] = int(torch.randint(dims.ring_len, (1,), generator=generator))
        layer["cursors"][slot, WINDOW_LIMIT] = limits[i % len(limits)] if limits else NO_LIMIT


def copy_of(layer: Tensors, dtype: torch.dtype | None = None) -> Tensors:
    """Independent tensors; floating ones in `dtype` if given, except the raw k and v of the ring."""

    def copy(name: str, tensor: Any) -> Any:
        if tensor is None or not tensor.is_floating_point() or dtype is None:
            return None if tensor is None else tensor.clone()
        return tensor.to(dtype) if name not in ("ring_k", "ring_v") else tensor.clone()

    return {name: copy(name, tensor) for name, tensor in layer.items()}


def options(dims: Dims) -> Tensors:
    return {
        "pad_slot_id": PAD,
        "scale": dims.head_k_dim**-0.5,
        "use_qk_l2norm": dims.l2norm,
        "lower_bound": dims.lower_bound,
        "max_window_len": 1,
    }


def _inputs(layer: Tensors, tokens: Tensors) -> tuple[Any, ...]:
    return (*(tokens[name] for name in ("q", "k", "v", "g", "beta")), layer["A_log"], layer["dt_bias"], layer["state"])


def empty_out(dims: Dims, tokens: Tensors, dtype: torch.dtype | None = None) -> torch.Tensor:
    shape = (len(tokens["q"]), dims.num_v_heads, dims.head_v_dim)
    return torch.full(shape, NAN, dtype=dtype or dims.act, device=tokens["q"].device)


def run_step(
    step: Any,
    dims: Dims,
    layer: Tensors,
    tokens: Tensors,
    slots: torch.Tensor,
    buffer_len: int | None = None,
    **more: Any,
) -> torch.Tensor:
    """Outputs of `step` (a backend's delta_step); float64 from the reference."""
    out = empty_out(dims, tokens, torch.float64 if step is reference.delta_step else None)
    rings = (layer[name] for name in RINGS)
    buffer_len = dims.buffer_len if buffer_len is None else buffer_len
    step(
        *_inputs(layer, tokens),
        *rings,
        layer["cursors"],
        slots,
        None,
        out,
        buffer_len=buffer_len,
        **options(dims),
        **more,
    )
    return out


def run_stepwise(
    stepwise: Any, dims: Dims, layer: Tensors, tokens: Tensors, slots: torch.Tensor, **more: Any
) -> torch.Tensor:
    out = empty_out(dims, tokens)
    stepwise(*_inputs(layer, tokens), slots, None, out, **options(dims), **more)
    return out


def run_materialize(
    materialize: Any, dims: Dims, layer: Tensors, slots: torch.Tensor, num_tokens: Any = None, **more: Any
) -> torch.Tensor:
    """The pool with every slot at its last committed token; NaN in other slots."""
    dst = torch.full_like(layer["state"], NAN)
    rings = (layer[name] for name in RINGS if name != "ring_u")
    materialize(layer["state"], *rings, layer["cursors"], slots, num_tokens, dst, slots, pad_slot_id=PAD,
                use_qk_l2norm=dims.l2norm, **more)  # fmt: skip
    return dst


def commit_one(dims: Dims, layer: Tensors, slots: torch.Tensor, buffer_len: int | None = None) -> None:
    """What `cursors.commit` does after one token a row, without a sync."""
    cursors = layer["cursors"]
    real = (slots >= 0) & (slots < len(cursors))
    rows = slots[real].long()
    owned = cursors[rows]
    flush = flush_mask(owned, torch.ones_like(rows), dims.buffer_len if buffer_len is None else buffer_len)
    start = torch.where(flush, (owned[:, RING_START] + owned[:, NUM_COMMITTED]) % dims.ring_len, owned[:, RING_START])
    cursors[rows, RING_START] = start.to(torch.int32)
    cursors[rows, NUM_COMMITTED] = torch.where(flush, 1, owned[:, NUM_COMMITTED] + 1).to(torch.int32)


def error(value: torch.Tensor, reference: torch.Tensor) -> float:
    """Largest relative error of a row, in the Euclidean norm; NaN counts as infinite."""
    value, reference = value.double().flatten(1), reference.double().flatten(1)
    errors = (value - reference).norm(dim=1) / reference.norm(dim=1).clamp(min=1e-30)
    return float(errors.nan_to_num(float("inf")).max())
