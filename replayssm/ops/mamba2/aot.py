"""What to compile ahead of time: every Mamba-2 kernel in every configuration of the tables, for all its targets."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from triton.experimental.gluon import language as gl

from replayssm.ops.aot import ALL_TARGETS, DTYPES, AotCase, launch_options
from replayssm.ops.mamba2 import configs, gluon_tile, gluon_tiles, triton_materialize, triton_step, triton_stepwise
from replayssm.ops.mamba2.configs import LaunchConfig, Shape

# Super, Nano, Falcon-H1.
SHAPES = {"64x128": (128, 8, 64, 128), "80x128": (96, 8, 80, 128), "128x256": (32, 2, 128, 256)}
_PLAIN = {"num_items", "num_slots", "num_dst", "buffer_len", "pad_slot_id"}
_FLOAT = {"A_ptr", "D_ptr", "dt_bias_ptr", "ring_dt_ptr"}
_INT = {"cursors_ptr", "slot_indices_ptr", "dst_indices_ptr", "num_tokens_ptr"}


def _argument(case: AotCase, name: str) -> tuple[str, bool]:
    if name == "state_desc":
        block = [1, case.constexprs["num_warps"], case.constexprs["BV"], case.constexprs["N"]]
        layout = gl.NVMMASharedLayout(0, 8 * DTYPES[case.state], rank=4)
        return f"tensordesc<{case.state}{block},{layout!r}>", False
    if not name.endswith("_ptr"):
        return "i32", name not in _PLAIN
    if name in ("state_ptr", "dst_ptr"):
        return f"*{case.state}", True
    return "*" + ("i32" if name in _INT else "fp32" if name in _FLOAT else "bf16"), True


def aot_cases() -> Iterator[AotCase]:
    """All cases: the portable kernels for every target, the Gluon kernels for those in `configs.FAST_ARCHS`."""
    for label, dims in SHAPES.items():
        for state, size in DTYPES.items():
            yield from _portable_cases(f"{label}-{state}", dims, state)
            batches = [min(largest, 256) for largest, _ in configs.STEP[size]]
            for arch in configs.FAST_ARCHS:
                shape = Shape(*dims, size, True, arch)
                for config in dict.fromkeys(configs.step_config(batch, shape) for batch in batches):
                    yield _gluon_case(f"{label}-{state}", dims, state, arch, config)
                if size == 2:
                    chunk = [min(largest, 256) for largest, _ in configs.STEP_CHUNK[1:]]
                    for config in dict.fromkeys(configs.step_config(batch, shape, True) for batch in chunk):
                        yield _gluon_case(f"{label}-{state}", dims, state, arch, config)


def _portable_cases(label: str, dims: tuple[int, int, int, int], state: str) -> Iterator[AotCase]:
    sizes = dict(zip(("H", "G", "P", "N"), dims, strict=True))
    block = {"BV": 16, "BK": dims[3]}
    features = {"HAS_D": True, "HAS_Z": True, "HAS_BIAS": True, "SOFTPLUS": True}
    kernels = (
        ("step", triton_step.mamba2_step_kernel, {**features, "R": 17, "ROWS": 16, "PDL": False}),
        ("stepwise", triton_stepwise.mamba2_stepwise_kernel, {**features, "PDL": False}),
        ("materialize", triton_materialize.mamba2_materialize_kernel, {"R": 17, "HAS_NUM_TOKENS": True}),
    )
    for name, kernel, more in kernels:
        yield AotCase(
            f"{name}-{label}", kernel, state, {**sizes, **block, **more}, {"num_warps": 4}, ALL_TARGETS, _argument
        )


def _gluon_case(label: str, dims: tuple[int, int, int, int], state: str, arch: str, config: LaunchConfig) -> AotCase:
    constexprs: dict[str, Any] = dict(zip(("H", "G", "P", "N"), dims, strict=True))
    constexprs |= {"HAS_D": True, "HAS_Z": False, "HAS_BIAS": True, "SOFTPLUS": True, "R": 17, "ROWS": 16, "PDL": True}
    constexprs |= {"BV": config.block_v, "APPENDERS": config.appenders, "SETTLE": config.settle}
    constexprs |= {"HINT": config.hint, "HINT_ROWS": config.hint_rows, "HINT_FIRST": config.hint_first}
    constexprs |= {"num_warps": config.num_warps}
    options = launch_options(config.num_warps, config.max_registers)
    if config.kernel == "tile":
        kernel: Any = gluon_tile.mamba2_tile_kernel
        constexprs |= {"HEADS": config.heads}
    else:
        kernel = gluon_tiles.mamba2_tiles_kernel
        constexprs |= {"TURNS": config.turns, "STAGES": config.stages}
        constexprs |= {"RING_FIRST": config.ring_first, "FLUSHERS": config.flushers, "CHUNKED": config.chunked}
    name = f"step-{label}-{configs.describe(config)}"
    return AotCase(name, kernel, state, constexprs, options, (arch,), _argument, gluon=True)
