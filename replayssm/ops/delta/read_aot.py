"""What to compile ahead of time of the GDN and KDA steps with a read copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replayssm.ops.aot import ALL_TARGETS, AotCase, launch_options
from replayssm.ops.delta import gluon_read_alone, gluon_read_step, triton_read_step
from replayssm.ops.delta.read_configs import PORTABLE, ReadConfig, ReadShape, read_config
from replayssm.ops.device import GLUON_ARCHS

# (k-heads, v-heads, KDA): Qwen3.5-122B, Kimi-Linear.
QWEN, KIMI = ("qwen", 16, 64, False), ("kimi", 32, 32, True)
PORTABLE_CASES = ((QWEN, "nvfp4", "fp8"),)
# A flushing launch of its own, but for bf16 copies and the smaller batches: one launch of larger programs.
GLUON_CASES = (
    *((QWEN, read, state, "sm90", 64) for read, state in (("int8", "fp16"), ("fp8", "bf16"))),
    (QWEN, "nvfp4", "fp32", "sm90", 32),
    *((QWEN, read, state, "sm90", 256) for read, state in (("bf16", "fp32"), ("none", "fp8"))),
    *((QWEN, read, state, "sm90", 256) for read, state in (("nvfp4", "fp16"), ("nvfp4", "fp8"), ("int8", "fp16"))),
    *((QWEN, read, state, "sm90", 256) for read, state in (("fp8", "fp32"), ("nvfp4", "fp32"))),
    *((QWEN, "nvfp4", "fp32", "sm90", batch) for batch in (4, 8, 64, 128)),
    *((KIMI, read, state, "sm90", batch) for read, state, batch in (("nvfp4", "fp8", 64), ("nvfp4", "fp32", 256))),
    *((QWEN, "nvfp4", "fp32", arch, batch) for arch in GLUON_ARCHS if arch != "sm90" for batch in (32, 256)),
)
_CODES = {"bf16": "bf16", "int8": "i8", "fp8": "u8", "nvfp4": "u8", "none": "u8"}
_SCALES = {"bf16": "fp32", "int8": "fp16", "fp8": "fp32", "nvfp4": "u8", "none": "fp32"}
_FLOAT = {"A_log", "dt_bias", "ring_g", "ring_beta", "global_scale", "state_scales"}
_INT = {"cursors", "slot_indices", "words"}
_ACTIVATIONS = {"q", "k", "v", "g", "beta", "ring_k", "ring_v", "ring_u", "out"}
# Strides of whole rows are multiples of 16.
_ALIGNED = ("stride_q", "stride_k", "stride_v", "stride_rk", "stride_ru", "stride_rv", "stride_out", "stride_codes")


def _argument(case: AotCase, name: str) -> tuple[str, bool]:
    if name in ("scale", "lower_bound"):
        return "fp32", False
    if name == "state":
        return f"*{'u8' if case.state == 'fp8' else case.state}", True
    if name == "seeds":
        return "*i64", True
    if name in ("codes", "scales"):
        return f"*{(_CODES if name == 'codes' else _SCALES)[case.constexprs['READ']]}", True
    if name in _FLOAT | _INT:
        return "*fp32" if name in _FLOAT else "*i32", True
    return ("*bf16", True) if name in _ACTIVATIONS else ("i32", name.startswith(_ALIGNED))


def aot_cases() -> Iterator[AotCase]:
    """The portable kernel for every target, the Gluon kernel for the tables' entries; what both share, once."""
    for layer, read, state in PORTABLE_CASES:
        more = {"BLOCK_K": 128, "BLOCK_V": 128, "READ": read, "CHECKPOINT": state}
        more |= {"NATIVE": False, "STOCHASTIC": False}
        kernel, options = triton_read_step.delta_read_step_kernel, {"num_warps": PORTABLE.num_warps}
        name, sizes = f"read-{layer[0]}-{read}-{state}", _sizes(*layer) | more
        # A program holds a head whole, whatever its size.
        yield AotCase(name, kernel, state, sizes, options, ALL_TARGETS, _argument, spill=2048)
    for (label, HK, HV, kda), read, state, arch, batch in GLUON_CASES:
        shape = ReadShape(HK, HV, 128, 128, kda, read, state, 17, True, arch)
        yield from _gluon_cases(label, shape, read_config(batch, shape))


def _gluon_cases(label: str, shape: ReadShape, config: ReadConfig) -> Iterator[AotCase]:
    read = shape.read
    more = {"COPY": read != "none", "READ": "fp8" if read == "none" else read, "SPLIT": shape.kda, "BLOCK_B": 256}
    more |= {"HEADS": config.heads, "CREW": config.crew, "EVERY": config.every, "CHUNK_HEADS": config.flush_heads}
    sizes = _sizes(label, shape.num_k_heads, shape.num_v_heads, shape.kda) | more
    name = f"read-{label}-{read}-{shape.checkpoint}-{config}"
    for kernel, warps, registers, spill in _kernels(config, shape.arch):
        known = sizes | {"BLOCK_V": config.flush_rows or 16 * warps}
        known = {argument: known[argument] for argument in kernel.arg_names if argument in known}
        options, part = launch_options(warps, registers), name if not config.flush_warps else f"{name}-{warps}"
        yield AotCase(part, kernel, shape.checkpoint, known, options, (shape.arch,), _argument, gluon=True, spill=spill)


def _kernels(config: ReadConfig, arch: str) -> list[tuple[Any, int, int | None, int]]:
    """Kernels of a configuration with their warps, registers and spills: all once a head, outside of loops."""
    if config.flush_warps:
        flush = (gluon_read_alone.delta_read_flush_kernel, config.flush_warps, config.flush_registers)
        read = (gluon_read_alone.delta_read_alone_kernel, 1, config.max_registers)
        return [(*flush, 40 if arch == "sm90" else 0), (*read, 0)]
    spill = 80 if config.max_registers == 128 and arch == "sm90" else 0
    return [(gluon_read_step.delta_read_step_kernel, config.num_warps, config.max_registers, spill)]


def _sizes(label: str, HK: int, HV: int, kda: bool) -> dict[str, Any]:
    sizes: dict[str, Any] = {"HV": HV, "GROUP": HV // HK, "K": 128, "V": 128, "BLOCK_L": 16, "KDA": kda, "NORM": True}
    return sizes | {"RAW": True, "HAS_BIAS": True, "BOUNDED": kda}
