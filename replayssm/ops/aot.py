"""A kernel to compile ahead of time: its arguments' types, constants and options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource

ALL_TARGETS = ("sm80", "sm89", "sm90", "sm100", "sm103", "sm120", "gfx942", "gfx950")
DTYPES = {"fp32": 4, "bf16": 2}  # of states, with the bytes of an element


@dataclass(frozen=True)
class AotCase:
    """One kernel; `source()` goes to `triton.compile` with `options`.

    argument: from the case and an argument's name to its type and whether it is known to be a multiple of 16.
    spill: bytes a thread that may be spilled: measured to cost less than more registers, or a fallback.
    """

    name: str
    kernel: Any
    state: str
    constexprs: dict[str, Any]
    options: dict[str, Any]
    targets: tuple[str, ...]
    argument: Callable[[AotCase, str], tuple[str, bool]]
    gluon: bool = False
    spill: int = 0

    def source(self) -> Any:
        """What the compiler takes."""
        signature, constexprs, attributes = {}, {}, {}
        for i, name in enumerate(self.kernel.arg_names):
            if name in self.constexprs:
                signature[name], constexprs[(i,)] = "constexpr", self.constexprs[name]
                continue
            signature[name], multiple_of_16 = self.argument(self, name)
            if multiple_of_16:
                attributes[(i,)] = [["tt.divisibility", 16]]
        return (GluonASTSource if self.gluon else ASTSource)(self.kernel, signature, constexprs, attributes)


def launch_options(num_warps: int, max_registers: int | None) -> dict[str, Any]:
    """Options of a configuration."""
    return {"num_warps": num_warps} | ({"maxnreg": max_registers} if max_registers else {})
