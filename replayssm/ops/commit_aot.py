"""What to compile ahead of time of the kernels that end a step: every variant, for every target."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from replayssm.ops.aot import ALL_TARGETS, AotCase
from replayssm.ops.commit_launch import ROWS
from replayssm.ops.moves import SPAN
from replayssm.ops.triton_cursors import commit_kernel, follow_windows_kernel, take_back_kernel
from replayssm.ops.triton_moves import move_rows_kernel

_INT = {"cursors", "slot_indices", "query_start_loc", "accepted", "paths", "num_tokens", "pending"}
_LONG = {"table"}


def _argument(case: AotCase, name: str) -> tuple[str, bool]:
    if name == "slots":  # requests that end a step by hand name them in int64
        return "*i64" if case.kernel is take_back_kernel else "*i32", True
    if name in _INT or name in _LONG:
        return "*i32" if name in _INT else "*i64", True
    return "i32", False


def aot_cases() -> Iterator[AotCase]:
    """Commits of all tokens, of counts and of paths; of windows one step late; taking back; rows of deep paths."""
    for name, counts, paths in (("all", False, False), ("counts", True, False), ("paths", False, True)):
        for ragged in (False, True):
            options = {"BLOCK": ROWS, "RAGGED": ragged, "COUNTS": counts, "PATHS": paths}
            yield _case(f"commit-{name}-{'ragged' if ragged else 'even'}", commit_kernel, options)
    for counts in (False, True):
        options = {"BLOCK": ROWS, "RAGGED": counts, "COUNTS": counts}
        yield _case(f"follow-{'counts' if counts else 'all'}", follow_windows_kernel, options)
    yield _case("take-back", take_back_kernel, {"BLOCK": ROWS})
    for depth in (4, 64):
        for word_bytes in (2, 4):
            sizes = {"SPAN": SPAN, "BLOCK": 1024 // depth, "DEPTH": depth, "WORD_BYTES": word_bytes}
            yield _case(f"move-rows-{depth}-{word_bytes}", move_rows_kernel, sizes)


def _case(name: str, kernel: Any, constexprs: dict[str, Any]) -> AotCase:
    return AotCase(name, kernel, "", constexprs, {"num_warps": 4}, ALL_TARGETS, _argument)
