"""What to compile ahead of time of the Mamba-2 steps with a read copy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replayssm.ops.aot import ALL_TARGETS, AotCase, launch_options
from replayssm.ops.mamba2 import gluon_read, triton_read
from replayssm.ops.mamba2.read_configs import ReadConfig, ReadShape, portable_config, read_config

# Super, Nano, Falcon-H1.
SHAPES = {"64x128": (128, 8, 64, 128), "80x128": (96, 8, 80, 128), "128x256": (32, 2, 128, 256)}
FORMATS = {
    "64x128": ("nvfp4/fp32", "nvfp4/fp8", "int8/fp16", "fp8/bf16", "bf16/fp32", "none/fp8"),
    "80x128": ("nvfp4/fp32", "nvfp4/fp8", "int8/fp16"),
    "128x256": ("nvfp4/fp32", "nvfp4/fp16"),
}
OTHER_REPLAY = ("nvfp4/fp32", "int8/fp16")  # compiled with the form of a flush that is not the default, too
PORTABLE = ("64x128", ("nvfp4/fp8", "int8/fp16", "bf16/fp32"))
BATCHES = (1, 16, 256)
GLUON_SPILL = 64  # bytes, in the code of heads that are encoded again: more registers would cost programs
_CODES = {"bf16": "bf16", "int8": "i8", "fp8": "u8", "nvfp4": "u8", "none": "u8"}
_SCALES = {"bf16": "fp32", "int8": "fp16", "fp8": "fp32", "nvfp4": "u8", "none": "fp32"}
_PLAIN = {"num_slots", "buffer_len", "pad_slot_id", "stream", "batch", "num_flushers", "num_readers"}
_FLOAT = {"A_ptr", "D_ptr", "dt_bias_ptr", "ring_dt_ptr", "state_scales_ptr", "global_ptr"}
_INT = {"cursors_ptr", "slot_indices_ptr", "query_start_loc_ptr", "parents_ptr"}


def _argument(case: AotCase, name: str) -> tuple[str, bool]:
    if not name.endswith("_ptr"):
        return "i32", name not in _PLAIN
    if name == "state_ptr":
        return f"*{'u8' if case.state == 'fp8' else case.state}", True
    if name == "seeds_ptr":
        return "*i64", True
    if name in ("codes_ptr", "scales_ptr"):
        return f"*{(_CODES if name == 'codes_ptr' else _SCALES)[case.constexprs['READ']]}", True
    return "*" + ("i32" if name in _INT else "fp32" if name in _FLOAT else "bf16"), True


def aot_cases() -> Iterator[AotCase]:
    """All cases: the portable kernel for every target, the Gluon kernel for sm_90."""
    for label, dims in SHAPES.items():
        for formats in FORMATS[label]:
            read, state = formats.split("/")
            sizes: dict[str, Any] = dict(zip(("H", "G", "P", "N"), dims, strict=True))
            sizes |= {"R": 20, "ROWS": 16, "HAS_D": True, "HAS_Z": True, "HAS_BIAS": True, "SOFTPLUS": True}
            sizes |= {"READ": read, "CHECKPOINT": state}
            name, shape = f"read-{label}-{read}-{state}", ReadShape(*dims, read, state, "sm90")
            if label == PORTABLE[0] and formats in PORTABLE[1]:
                yield _portable_case(name, sizes, shape)
            for config in dict.fromkeys(read_config(batch, shape) for batch in BATCHES):
                default = "serial" if state == "fp32" else "chunk"
                yield _gluon_case(name, sizes, state, config, default)
                if label == PORTABLE[0] and formats in OTHER_REPLAY:
                    yield _gluon_case(name, sizes, state, config, "chunk" if default == "serial" else "serial")


def _portable_case(name: str, sizes: dict[str, Any], shape: ReadShape) -> AotCase:
    blocks = {"BV": 1 << (shape.head_dim - 1).bit_length(), "BK": shape.d_state}
    constexprs = {**sizes, **blocks, "NATIVE": False, "WINDOWS": True, "TREE": True, "STOCHASTIC": False}
    options = {"num_warps": portable_config(shape).num_warps}
    kernel = triton_read.mamba2_portable_read_kernel
    return AotCase(name, kernel, shape.checkpoint, constexprs, options, ALL_TARGETS, _argument)


def _gluon_case(name: str, sizes: dict[str, Any], state: str, config: ReadConfig, replay: str) -> AotCase:
    launch = {"TILES": config.tiles, "GROUP": config.group, "DEPTH": config.depth, "FLUSH_ROWS": config.flush_rows}
    launch |= {"EVERY": config.every, "APPENDERS": config.appenders, "AHEAD": config.ahead, "HINT": config.hint}
    constexprs = {**sizes, **launch, "REPLAY": replay}
    options = launch_options(config.num_warps, config.max_registers)
    kernel = gluon_read.mamba2_read_kernel
    name, spill = f"{name}-{replay}-{config}-{config.depth}", GLUON_SPILL
    return AotCase(name, kernel, state, constexprs, options, ("sm90",), _argument, gluon=True, spill=spill)
