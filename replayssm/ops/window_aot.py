"""What to compile ahead of time: every window kernel in every configuration of the tables, for all its targets."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from replayssm.ops.aot import ALL_TARGETS, DTYPES, AotCase, launch_options
from replayssm.ops.delta import gluon_window as delta_gluon
from replayssm.ops.delta import triton_window as delta_triton
from replayssm.ops.delta import window_launch as delta
from replayssm.ops.device import GLUON_ARCHS
from replayssm.ops.mamba2 import gluon_window as mamba2_gluon
from replayssm.ops.mamba2 import triton_window as mamba2_triton
from replayssm.ops.mamba2 import window_launch as mamba2

# Super, Nano, Falcon-H1; (k-heads, v-heads, K, V, KDA): Qwen3.5-122B, Kimi-Linear.
MAMBA2_SHAPES = {"64x128": (128, 8, 64, 128), "80x128": (96, 8, 80, 128), "128x256": (32, 2, 128, 256)}
DELTA_SHAPES = {"qwen": (16, 64, 128, 128, False), "kimi": (32, 32, 128, 128, True)}
BATCHES = (1, 8, 64, 256)
WINDOWS = (4, 6)
# GDN and KDA: what stays the same for all tiles of a program, in excess of its registers; with more of them fewer
# programs share a multiprocessor, which was a third slower (KDA at batch 256).
DELTA_SPILL = 64
_FLOAT = {"A", "D", "dt_bias", "ring_dt", "A_log", "ring_g", "ring_beta"}
_INT = {"cursors", "slot_indices", "query_start_loc", "parents"}
_ACTIVATIONS = {
    "x",
    "dt",
    "B",
    "C",
    "z",
    "ring_x",
    "ring_B",
    "out",
    "q",
    "k",
    "v",
    "g",
    "beta",
    "ring_k",
    "ring_v",
    "ring_u",
}
# Strides of whole rows are multiples of 16.
_ALIGNED = (
    "x_",
    "B_",
    "C_",
    "out_",
    "ring_x_",
    "ring_B_",
    "stride_q",
    "stride_k",
    "stride_v",
    "stride_out",
    "stride_r",
)
_UNALIGNED = ("stride_rg", "stride_rb")


def _argument(case: AotCase, name: str) -> tuple[str, bool]:
    if name in ("scale", "lower_bound"):
        return "fp32", False
    bare = name.removesuffix("_ptr")
    if name.startswith("stride_rg") and case.constexprs.get("KDA"):
        return "i32", True
    if bare == "state":
        return f"*{case.state}", True
    if bare in _ACTIVATIONS:
        return "*bf16", True
    if bare in _FLOAT or bare in _INT:
        return "*fp32" if bare in _FLOAT else "*i32", True
    return "i32", name.startswith(_ALIGNED) and not name.startswith(_UNALIGNED)


def aot_cases() -> Iterator[AotCase]:
    """All cases: the portable kernels for every target, the Gluon kernels for those in `GLUON_ARCHS`."""
    for state, size in DTYPES.items():
        for label, dims in MAMBA2_SHAPES.items():
            yield from _mamba2_cases(f"mamba2-window-{label}-{state}", dims, state, size)
        for label, heads in DELTA_SHAPES.items():
            yield from _delta_cases(f"delta-window-{label}-{state}", heads, state, size)


def _gluon_configs(configs: Iterable[Any]) -> list[Any]:
    """Each once, without those that name the portable kernel."""
    return [config for config in dict.fromkeys(configs) if config.backend == "gluon"]


def _mamba2_cases(label: str, dims: tuple[int, int, int, int], state: str, size: int) -> Iterator[AotCase]:
    sizes: dict[str, Any] = dict(zip(("H", "G", "P", "N"), dims, strict=True))
    sizes |= {"HAS_D": True, "HAS_Z": True, "HAS_BIAS": True, "SOFTPLUS": True, "R": 22, "ROWS": 16, "TREE": True}
    tile = {"BV": 1024 // dims[3], "BK": dims[3]}
    yield AotCase(
        label, mamba2_triton.mamba2_window_kernel, state, sizes | tile, {"num_warps": 4}, ALL_TARGETS, _argument
    )
    for arch in GLUON_ARCHS:
        for length in WINDOWS:
            shape = mamba2.WindowShape(*dims, size, length, 16, arch)
            more = sizes | {"TOKENS": 8, "HAS_Z": False, "FLUSH_ROWS": 16}
            for chunk in (False, True)[: 2 if size == 2 else 1]:
                for config in _gluon_configs(mamba2.window_config(batch, shape, chunk) for batch in BATCHES):
                    name, form = f"{label}-chunk" if chunk else label, more | mamba2.tile_options(config)
                    yield _gluon_case(name, mamba2_gluon.mamba2_window_kernel, state, form, "BV", config, arch)


def _delta_cases(label: str, heads: tuple[int, int, int, int, bool], state: str, size: int) -> Iterator[AotCase]:
    HK, HV, K, V, kda = heads
    sizes = {"HV": HV, "GROUP": HV // HK, "K": K, "V": V, "KDA": kda, "NORM": True, "ROWS": 16, "TREE": True}
    sizes |= {"RAW": True, "HAS_BIAS": True, "BOUNDED": kda}
    tile = {"BLOCK_V": 16, "BLOCK_K": K}
    yield AotCase(
        label, delta_triton.delta_window_kernel, state, sizes | tile, {"num_warps": 4}, ALL_TARGETS, _argument
    )
    for arch in GLUON_ARCHS:
        for length in WINDOWS:
            shape = delta.WindowShape(HK, HV, K, V, kda, size, length, 16, arch)
            more = sizes | {"TOKENS": 4 if length <= 4 else 8, "WINDOW": length}
            for config in _gluon_configs(delta.window_config(batch, shape) for batch in BATCHES):
                for replay in ("chunk", "serial"):
                    form = more | {"CHUNK": replay == "chunk"}
                    name, kernel = f"{label}-{replay}", delta_gluon.delta_window_kernel
                    yield replace(_gluon_case(name, kernel, state, form, "BLOCK_V", config, arch), spill=DELTA_SPILL)


def _gluon_case(
    label: str, kernel: Any, state: str, sizes: dict[str, Any], rows: str, config: Any, arch: str
) -> AotCase:
    constexprs = sizes | {
        rows: config.block_v,
        "TILES": config.num_tiles,
        "STAGES": config.stages,
        "SETTLE": config.settle,
        "HINT": config.hint,
        "FLUSHERS": config.flushers,
        "EARLY": config.heads * config.block_v if config.early is None else config.early,
    }
    options = launch_options(config.num_warps, config.max_registers)
    name = f"{label}-{sizes['TOKENS']}-{config.num_tiles}x{config.block_v}"
    return AotCase(name, kernel, state, constexprs, options, (arch,), _argument, gluon=True)
