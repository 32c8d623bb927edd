"""What to compile ahead of time: every GDN and KDA kernel in every configuration of the tables, for all its targets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from replayssm.ops.aot import ALL_TARGETS, DTYPES, AotCase, launch_options
from replayssm.ops.delta import (
    configs,
    gluon_materialize,
    gluon_step,
    gluon_stepwise,
    triton_materialize,
    triton_step,
    triton_stepwise,
)
from replayssm.ops.delta.configs import LaunchConfig, Shape
from replayssm.ops.device import GLUON_ARCHS

# (k-heads, v-heads, K, V, KDA): Qwen3.5-122B, Kimi-Linear.
SHAPES = {"qwen": (16, 64, 128, 128, False), "kimi": (32, 32, 128, 128, True)}
BATCHES = (1, 8, 32, 256)
# In rows that flush: addresses of the loop over tiles; and an fp32 tile in chunk form, which is not the default.
FLUSH_SPILL, FP32_CHUNK_SPILL = 64, 208
_FLOAT = {"A_log", "dt_bias", "ring_g", "ring_beta"}
_INT = {"cursors", "slot_indices", "dst_indices", "num_tokens"}
_POINTERS = {"q", "k", "v", "g", "beta", "ring_k", "ring_v", "ring_u", "out", "state", "dst"} | _FLOAT | _INT


def _argument(case: AotCase, name: str) -> tuple[str, bool]:
    if name in ("scale", "lower_bound"):
        return "fp32", False
    if name not in _POINTERS:
        # Strides of whole rows are multiples of 16.
        return "i32", name.startswith(("stride_q", "stride_k", "stride_v", "stride_rk", "stride_state"))
    if name in ("state", "dst"):
        return f"*{case.state}", True
    return "*i32" if name in _INT else "*fp32" if name in _FLOAT else "*bf16", True


def aot_cases() -> Iterator[AotCase]:
    """All cases: the portable kernels for every target, the Gluon kernels for those in `GLUON_ARCHS`."""
    for label, (HK, HV, K, V, kda) in SHAPES.items():
        for state, size in DTYPES.items():
            sizes = {"HV": HV, "GROUP": HV // HK, "K": K, "V": V, "KDA": kda, "NORM": True}
            yield from _portable_cases(f"{label}-{state}", sizes, state)
            for arch in GLUON_ARCHS:
                shape = Shape(HK, HV, K, V, kda, size, 17, True, arch)
                yield from _gluon_cases(f"{label}-{state}", sizes, state, shape)


def _gates(bounded: bool) -> dict[str, bool]:
    return {"RAW": True, "HAS_BIAS": True, "BOUNDED": bounded}


def _portable_cases(label: str, sizes: dict[str, Any], state: str) -> Iterator[AotCase]:
    tile = {**sizes, "BLOCK_K": sizes["K"], "BLOCK_V": 4096 // sizes["K"]}
    kernels = (
        ("step", triton_step.delta_step_kernel, {**_gates(sizes["KDA"]), "BLOCK_L": 16}),
        ("stepwise", triton_stepwise.delta_stepwise_kernel, _gates(sizes["KDA"])),
        ("materialize", triton_materialize.delta_materialize_kernel, {"ALL_ROWS": False}),
    )
    for name, kernel, more in kernels:
        yield AotCase(f"{name}-{label}", kernel, state, {**tile, **more}, {"num_warps": 4}, ALL_TARGETS, _argument)


def _gluon_cases(label: str, sizes: dict[str, Any], state: str, shape: Shape) -> Iterator[AotCase]:
    steps = list(dict.fromkeys(configs.step_config(batch, shape) for batch in BATCHES))
    for config in steps:
        more = {**sizes, **_gates(False), "BLOCK_L": 16, **configs.step_options(config)}
        # With an fp32 checkpoint the chunk form is an option, with others the serial form is.
        forms = [("step", False)]
        if config.block_v >= 16 * config.num_warps and (state != "fp32" or config == steps[-1]):
            forms.append(("chunk", True))
        for name, chunk in forms:
            case = _gluon_case(name, gluon_step.delta_step_kernel, label, more | {"CHUNK": chunk}, state, shape, config)
            yield replace(case, spill=FLUSH_SPILL if state != "fp32" else FP32_CHUNK_SPILL if chunk else 0)
    for config in dict.fromkeys(configs.stepwise_config(batch, shape) for batch in BATCHES):
        more = {**sizes, **_gates(False)}
        yield _gluon_case("stepwise", gluon_stepwise.delta_stepwise_kernel, label, more, state, shape, config)
    more = {**sizes, "BLOCK_L": 16, "ALL_ROWS": True}
    config = configs.materialize_config(shape)
    yield _gluon_case("materialize", gluon_materialize.delta_materialize_kernel, label, more, state, shape, config)


def _gluon_case(
    name: str, kernel: Any, label: str, constexprs: dict[str, Any], state: str, shape: Shape, config: LaunchConfig
) -> AotCase:
    options = launch_options(config.num_warps, config.max_registers)
    constexprs = {**constexprs, "BLOCK_V": config.block_v}
    return AotCase(f"{name}-{label}-{config}", kernel, state, constexprs, options, (shape.arch,), _argument, gluon=True)
