"""What to compile ahead of time of the convolution kernels: small and large batches, windows; with a bias or not."""

from __future__ import annotations

from collections.abc import Iterator

from replayssm.ops.aot import ALL_TARGETS, AotCase
from replayssm.ops.triton_conv import conv_step_kernel, conv_window_kernel

_TENSORS = {"x", "weight", "bias", "state", "out"}
_INDICES = {"slot_indices", "query_start_loc", "num_accepted_tokens"}


def _argument(case: AotCase, name: str) -> tuple[str, bool]:
    if name in _TENSORS:
        return "*bf16", True
    if name in _INDICES:
        return "*i32", True
    return "i32", name == "channels" or name.startswith("stride")


def aot_cases() -> Iterator[AotCase]:
    """Both sizes of a program; windows of four tokens."""
    for name, block, rows, warps in (("small", 256, 1, 2), ("large", 1024, 4, 4)):
        for bias in (False, True):
            options = {"BLOCK": block, "ROWS": rows, "HAS_BIAS": bias, "SILU": True, "PDL": False}
            case = f"conv-{name}{'-bias' if bias else ''}"
            yield AotCase(case, conv_step_kernel, "", options, {"num_warps": warps}, ALL_TARGETS, _argument)
    for bias in (False, True):
        options = {"WINDOW": 4, "BLOCK": 512, "HAS_BIAS": bias, "SILU": True, "PDL": False}
        case = f"conv-window{'-bias' if bias else ''}"
        yield AotCase(case, conv_window_kernel, "", options, {"num_warps": 2}, ALL_TARGETS, _argument)
