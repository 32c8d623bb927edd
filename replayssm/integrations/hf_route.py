"""Route the decode calls of transformers' modeling modules to ReplaySSM when their state belongs to our cache."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any

import torch

from replayssm.checks import fail
from replayssm.config import GDNSpec
from replayssm.integrations.hf_cache import ROUTE, DecodeRoute
from replayssm.step import delta_decode, mamba2_decode

# The module global that a family's layers call for one token, and the name of its state argument.
DECODE_CALLS = {
    "mamba2": ("mamba2_selective_state_update", "state"),
    "gdn": ("torch_recurrent_gated_delta_rule", "initial_state"),
    "kda": ("recurrent_kimi_delta_attention", "initial_state"),
}
# The same for several tokens: a prefill, or a window of drafts.
WINDOW_CALLS = {
    "mamba2": ("mamba2_chunk_scan", "initial_states"),
    "gdn": ("torch_chunk_gated_delta_rule", "initial_state"),
    "kda": ("chunk_kimi_delta_attention", "initial_state"),
}

# (module, global) -> what it was, and how many enabled models need the replacement.
_patched: dict[tuple[ModuleType, str], tuple[Callable[..., Any], int]] = {}


def acquire(modules: Iterable[ModuleType], families: Iterable[str]) -> list[tuple[ModuleType, str]]:
    """Replace the globals of `families` in `modules`; returns what to hand to `release`."""
    taken = []
    for module in modules:
        for family in families:
            for (name, state_name), route in ((DECODE_CALLS[family], _DECODE), (WINDOW_CALLS[family], _WINDOW)):
                if not hasattr(module, name):
                    continue
                original, users = _patched.get((module, name), (getattr(module, name), 0))
                if users == 0:
                    setattr(module, name, _routed(original, state_name, route[family]))
                _patched[module, name] = original, users + 1
                taken.append((module, name))
    return taken


def release(taken: Iterable[tuple[ModuleType, str]]) -> None:
    """Undo `acquire`; the last user restores the original."""
    for module, name in taken:
        original, users = _patched[module, name]
        if users > 1:
            _patched[module, name] = original, users - 1
        else:
            setattr(module, name, original)
            del _patched[module, name]


def _routed(original: Callable[..., Any], state_name: str, replay: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def routed(*args: Any, **kwargs: Any) -> Any:
        state = kwargs[state_name] if state_name in kwargs else args[0]
        route = getattr(state, ROUTE, None)
        return original(*args, **kwargs) if route is None else replay(route, *args, **kwargs)

    return routed


def _as_activation(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Widen to the ring's dtype, the last dimension contiguous; narrowing would lose what the flush must replay."""
    if torch.promote_types(tensor.dtype, dtype) != dtype:
        raise fail(f"{name}.dtype", tensor.dtype, f"{dtype}, or a narrower one; enable(model, activation=...) sets it")
    tensor = tensor.to(dtype)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _decode_mamba2(
    route: DecodeRoute,
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor:
    layer, step = route.open()
    x, B, C = (_as_activation(n, t, route.activation) for n, t in (("x", hidden_states), ("B", B), ("C", C)))
    y = mamba2_decode(
        layer,
        step,
        x,
        dt[..., 0],
        A[:, 0, 0],
        B,
        C,
        D=None if D is None else D[:, 0],
        z=z,
        dt_bias=None if dt_bias is None else dt_bias[:, 0],
        dt_softplus=dt_softplus,
    )
    return y.to(hidden_states.dtype)


def _window_mamba2(
    route: DecodeRoute,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *_: Any,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    return_final_states: bool = False,
    **__: Any,
) -> Any:
    """Several tokens, which a prefill would clamp the time steps of, but decoding does not."""
    layer, step = route.open()
    x, B, C = (_as_activation(n, t, route.activation) for n, t in (("x", hidden_states), ("B", B), ("C", C)))
    x, dt, B, C = (t.flatten(0, 1) for t in (x, dt, B, C))
    z = None if z is None else z.flatten(0, 1)
    y = mamba2_decode(layer, step, x, dt, A, B, C, D=D, z=z, dt_bias=dt_bias, dt_softplus=dt_softplus)
    y = y.view_as(hidden_states).to(hidden_states.dtype)
    return (y, initial_states) if return_final_states else y


def _decode_delta(
    route: DecodeRoute,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    layer, step = route.open()
    assert isinstance(layer.spec, GDNSpec)
    # Some versions repeat q and k to the v-heads before the call: take one of each group.
    every = query.shape[2] // layer.spec.num_k_heads
    inputs = {"q": query[:, :, ::every], "k": key[:, :, ::every], "v": value}
    q, k, v = (_as_activation(name, t.flatten(0, 1), route.activation) for name, t in inputs.items())
    if use_qk_l2norm_in_kernel != layer.spec.use_qk_l2norm:
        raise fail(
            "use_qk_l2norm_in_kernel", use_qk_l2norm_in_kernel, f"{layer.spec.use_qk_l2norm}, as in the layer's spec"
        )
    out = delta_decode(layer, step, q, k, v, g.flatten(0, 1), beta.flatten(0, 1))
    return out.view_as(value).to(query.dtype), initial_state if output_final_state else None


_DECODE: dict[str, Callable[..., Any]] = {"mamba2": _decode_mamba2, "gdn": _decode_delta, "kda": _decode_delta}
_WINDOW: dict[str, Callable[..., Any]] = {"mamba2": _window_mamba2, "gdn": _decode_delta, "kda": _decode_delta}
