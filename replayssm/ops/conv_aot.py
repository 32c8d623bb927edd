"""What to compile ahead of time of the convolution kernel: one token a row, and windows; with a bias or not."""

from __future__ import annotations

from collections.abc import Iterator

from replayssm.ops.aot import ALL_TARGETS, AotCase
from replayssm.ops.conv_launch import BLOCK, num_warps
from replayssm.ops.triton_conv import conv_kernel

_TENSORS = {"x", "weight", "bias", "state", "out", "cleared"}
_INDICES = {"slot_indices", "query_start_loc", "num_accepted_tokens"}


def _argument(case: AotCase, name: str) -> tuple[str, bool]:
    if name in _TENSORS:
        return "*bf16", True
    if name in _INDICES:
        return "*i32", True
    return "i32", name in ("channels", "width") or name.startswith("stride")


def aot_cases() -> Iterator[AotCase]:
    """Windows of one and of four tokens."""
    for name, window in (("step", 1), ("window", 4)):
        for bias in (False, True):
            ragged = {"RAGGED": window > 1, "CLEAR": window > 1}
            options = {"WINDOW": window, "BLOCK": BLOCK, "HAS_BIAS": bias, "SILU": True, "PDL": False, **ragged}
            case = f"conv-{name}{'-bias' if bias else ''}"
            launch = {"num_warps": num_warps(BLOCK)}
            yield AotCase(case, conv_kernel, "", options, launch, ALL_TARGETS, _argument)
