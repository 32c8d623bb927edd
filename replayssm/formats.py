"""Storage formats of a state: their names, roles and bytes (docs/design.md says what the quantised ones mean)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.checks import ReplayError


@dataclass(frozen=True)
class Format:
    """`bits` an element, `scale_bytes` every `block` elements along K (0: a whole row), `head_bytes` a head."""

    name: str
    bits: int
    dtype: torch.dtype | None = None
    block: int = 0
    scale_bytes: int = 0
    head_bytes: int = 0

    def head_nbytes(self, V: int, K: int) -> int:
        """Bytes of one head's `[V, K]` state."""
        blocks = V if self.block == 0 else V * K // self.block
        return V * K * self.bits // 8 + self.scale_bytes * blocks + self.head_bytes

    def fits(self, K: int) -> bool:
        """Whether K can be cut into this format's blocks."""
        return self.block == 0 or K % self.block == 0

    def check_dims(self, role: str, K: int) -> None:
        """Raise if K cannot be cut into this format's blocks."""
        if not self.fits(K):
            raise ReplayError(f"{role} is {self.name!r} with K = {K}; allowed: K divisible by {self.block}")


CHECKPOINT_FORMATS = {
    f.name: f
    for f in (
        Format("fp32", 32, torch.float32),
        Format("fp16", 16, torch.float16),
        Format("bf16", 16, torch.bfloat16),
        Format("fp8", 8, scale_bytes=4),
    )
}
READ_FORMATS = {
    f.name: f
    for f in (
        Format("none", 0),
        Format("bf16", 16, torch.bfloat16),
        Format("int8", 8, block=32, scale_bytes=2),
        Format("fp8", 8, scale_bytes=4),
        Format("nvfp4", 4, block=16, scale_bytes=1, head_bytes=4),
    )
}
