"""What to compile ahead of time of the window kernels with a read copy: the tables' entries, for their targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replayssm.ops.aot import ALL_TARGETS, AotCase, launch_options
from replayssm.ops.delta import gluon_read_window as delta_kernels
from replayssm.ops.delta import read_window_configs as delta
from replayssm.ops.delta import triton_read_window
from replayssm.ops.delta.read_configs import ReadShape as DeltaShape
from replayssm.ops.device import GLUON_ARCHS
from replayssm.ops.mamba2 import read_window_launch as mamba2
from replayssm.ops.mamba2.read_configs import ReadShape as Mamba2Shape

# Super, Nano; (k-heads, v-heads, KDA): Qwen3.5-122B, Kimi-Linear.
MAMBA2_SHAPES = {"64x128": (128, 8, 64, 128), "80x128": (96, 8, 80, 128)}
DELTA_SHAPES = {"qwen": (16, 64, False), "kimi": (32, 32, True)}
# Read format, checkpoint, tokens, rows, batch; on sm_90 all, elsewhere the first.
CASES = (
    *(("nvfp4", "fp32", 4, 16, 256), ("nvfp4", "fp8", 8, 16, 8), ("int8", "fp16", 4, 16, 64)),
    *(("fp8", "bf16", 4, 16, 256), ("bf16", "fp32", 4, 16, 256), ("none", "fp8", 4, 16, 256)),
    *(("nvfp4", "fp32", 8, 32, 256), ("nvfp4", "bf16", 16, 32, 8), ("int8", "fp32", 16, 32, 64)),
    *(("fp8", "fp16", 16, 32, 256), ("bf16", "bf16", 16, 32, 256), ("nvfp4", "fp8", 8, 32, 64)),
)
# The tables have other entries for smaller batches.
SMALLER = (("nvfp4", "fp32", 4, 16, 8), ("int8", "fp16", 4, 16, 8), ("nvfp4", "bf16", 4, 16, 64))
_CODES = {"bf16": "bf16", "int8": "i8", "fp8": "u8", "nvfp4": "u8", "none": "u8"}
_SCALES = {"bf16": "fp32", "int8": "fp16", "fp8": "fp32", "nvfp4": "u8", "none": "fp32"}
_FLOAT = {"A", "D", "dt_bias", "ring_dt", "A_log", "ring_g", "ring_beta", "global", "global_scale", "state_scales"}
_INT = {"cursors", "slot_indices", "query_start_loc", "parents"}
_PLAIN = {
    "num_slots",
    "ring_len",
    "buffer_len",
    "pad_slot_id",
    "batch",
    "stream",
    "dt_head",
    "stride_g_head",
    "stride_beta_head",
}
_UNALIGNED = ("stride_rg", "stride_rb", "stride_g", "stride_beta", "stride_global", "dt_", "ring_dt", "global_")
_SPILL = 48  # bytes: a program that flushes spills around its loops; more registers leave readers less room
_READ_SPILL = 32  # of five to eight tokens: fewer programs a multiprocessor cost more


def _argument(case: AotCase, name: str) -> tuple[str, bool]:
    if name in ("scale", "lower_bound"):
        return "fp32", False
    bare = name.removesuffix("_ptr")
    if bare == "state":
        return f"*{'u8' if case.state == 'fp8' else case.state}", True
    if bare == "seeds":
        return "*i64", True
    if bare in ("codes", "scales"):
        return f"*{(_CODES if bare == 'codes' else _SCALES)[case.constexprs['READ']]}", True
    if bare in _FLOAT | _INT:
        return "*fp32" if bare in _FLOAT else "*i32", True
    is_pointer = name.endswith("_ptr") or name in ("q", "k", "v", "g", "beta", "out", "ring_k", "ring_v", "ring_u")
    if is_pointer:
        return "*bf16", True
    return "i32", name not in _PLAIN and not name.startswith(("chunks", *_UNALIGNED))


def aot_cases() -> Iterator[AotCase]:
    """All cases: the portable GDN and KDA kernel for every target, the Gluon kernels for those in `GLUON_ARCHS`."""
    for label, heads in DELTA_SHAPES.items():
        yield _portable_case(label, heads, "nvfp4", "fp8")
    for arch in GLUON_ARCHS:
        for i, case in enumerate(CASES):
            # One layer a family has all formats, on sm_90.
            some = slice(0, 0) if i > 0 and arch != "sm90" else slice(0, 1) if i > 0 else slice(None)
            for label, dims in list(MAMBA2_SHAPES.items())[some]:
                yield from _mamba2_cases(label, dims, *case, arch)
            for label, heads in list(DELTA_SHAPES.items())[some]:
                yield from _delta_cases(label, heads, *case, arch)
        for case in SMALLER if arch == "sm90" else SMALLER[:1]:
            for label, dims in MAMBA2_SHAPES.items():
                yield from _mamba2_cases(label, dims, *case, arch)
            yield from _delta_cases("qwen", DELTA_SHAPES["qwen"], *case, arch)
    # KDA's tables of 32 rows are the largest.
    yield from _delta_cases("kimi", DELTA_SHAPES["kimi"], "nvfp4", "fp32", 8, 32, 256, "sm90")


def _portable_case(label: str, heads: tuple[int, int, bool], read: str, state: str) -> AotCase:
    num_k_heads, num_v_heads, kda = heads
    sizes: dict[str, Any] = {
        "HV": num_v_heads,
        "GROUP": num_v_heads // num_k_heads,
        "K": 128,
        "V": 128,
        "BLOCK_K": 128,
        "BLOCK_V": 128,
    }
    sizes |= {"ROWS": 16, "READ": read, "CHECKPOINT": state, "NATIVE": False, "STOCHASTIC": False, "TREE": True}
    sizes |= {"KDA": kda, "RAW": True, "HAS_BIAS": True, "BOUNDED": kda, "NORM": True}
    options, name = {"num_warps": delta.PORTABLE.num_warps}, f"delta-{label}-portable-{read}-{state}"
    kernel = triton_read_window.delta_portable_read_window_kernel
    # A program holds a head whole, whatever its size.
    return AotCase(name, kernel, state, sizes, options, ALL_TARGETS, _argument, spill=2048)


def _mamba2_cases(
    label: str, dims: tuple[int, int, int, int], read: str, state: str, tokens: int, rows: int, batch: int, arch: str
) -> Iterator[AotCase]:
    """The flushing kernel and the reading one."""
    shape = Mamba2Shape(*dims, read, state, arch)
    more: dict[str, Any] = {"R": rows + tokens, "ROWS": rows, "WINDOW": tokens, "TREE": tokens > 4}
    more |= {"HAS_D": True, "HAS_Z": label == "64x128", "HAS_BIAS": True, "SOFTPLUS": True}
    more["REPLAY"] = "serial" if state == "fp32" else "chunk"
    config = mamba2.read_window_config(batch, shape, rows, tokens)
    for kernel, _, known in mamba2.gluon_launches(config, batch, shape):
        yield _case(f"mamba2-{label}", kernel, read, state, tokens, known | more, arch)


def _delta_cases(
    label: str, heads: tuple[int, int, bool], read: str, state: str, tokens: int, rows: int, batch: int, arch: str
) -> Iterator[AotCase]:
    """The flushing kernel and the reading one."""
    num_k_heads, num_v_heads, kda = heads
    shape = DeltaShape(num_k_heads, num_v_heads, 128, 128, kda, read, state, rows + tokens, True, arch)
    more: dict[str, Any] = {"ROWS": rows, "TOKENS": tokens, "TREE": tokens > 4, "KDA": kda}
    more |= {"RAW": True, "HAS_BIAS": True, "BOUNDED": kda, "NORM": True}
    config = delta.read_window_config(batch, shape, rows, tokens)
    kernels = (delta_kernels.delta_read_window_flush_kernel, delta_kernels.delta_read_window_kernel)
    for kernel, (_, known) in zip(kernels, delta.gluon_launches(config, batch, shape, True), strict=True):
        yield _case(f"delta-{label}", kernel, read, state, tokens, known | more, arch)


def _case(label: str, kernel: Any, read: str, state: str, tokens: int, known: dict[str, Any], arch: str) -> AotCase:
    sizes = {name: value for name, value in known.items() if name in kernel.arg_names}
    options = launch_options(known["num_warps"], known["maxnreg"])
    kind = next((kind for kind in ("flush", "joint") if kind in kernel.__name__), "read")
    name = f"{label}-{kind}-{read}-{state}-{tokens}x{known['ROWS']}-{known['num_warps']}"
    spill = _SPILL if kind != "read" else _READ_SPILL if tokens == 8 else 0
    return AotCase(name, kernel, state, sizes, options, (arch,), _argument, gluon=True, spill=spill)
