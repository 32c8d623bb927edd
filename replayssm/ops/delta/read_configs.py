"""Launch configurations of the GDN and KDA step with a read copy: data, chosen from what the host knows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

from replayssm.ops.device import GLUON_ARCHS
from replayssm.ops.window_config import divisor


@dataclass(frozen=True)
class ReadConfig:
    """How a step with a read copy is launched.

    backend: "triton" (portable) or "gluon" (NVIDIA). For Gluon: heads: v-heads of one k-head a reading program; crew:
    programs that flush, every `every`-th of the grid's first. flush_warps, flush_registers: of flushing programs in a
    launch of their own beside readers of one warp, 0: one launch, which flushes token by token, whatever `replay` says;
    flush_heads: v-heads of one k-head that they flush in chunk form with common tables; flush_rows: V rows of a tile of
    theirs, 0: 16 a warp.
    """

    backend: str
    num_warps: int
    heads: int = 1
    crew: int = 0
    every: int = 1
    flush_heads: int = 1
    flush_warps: int = 0
    flush_registers: int | None = None
    max_registers: int | None = None
    flush_rows: int = 0

    def __str__(self) -> str:
        crew = f", {self.heads} heads a program, {self.crew} flushing" if self.backend == "gluon" else ""
        apart = f" in a launch of {self.flush_warps} warps" if self.flush_warps else ""
        return f"{self.backend} read, {self.num_warps} warps{crew}{apart}"


@dataclass(frozen=True)
class ReadShape:
    """What a choice depends on besides the batch. fast: 16-bit activations, 16-byte accesses to all that is large."""

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    kda: bool
    read: str
    checkpoint: str
    ring_len: int
    fast: bool
    arch: str


def _read(num_warps: int, heads: int, crew: int, every: int, registers: int = 128) -> ReadConfig:
    return ReadConfig("gluon", num_warps, heads, crew, every, max_registers=registers)


PORTABLE = ReadConfig("triton", 16)


def _small(heads: int) -> tuple[tuple[int, ReadConfig], tuple[int, ReadConfig]]:
    """Registers for a replay whose sums do not wait for one another, while a program a multiprocessor is enough."""
    return (128 * heads, _read(8, heads, 512, 1, 168)), (1024, _read(8, heads, 512, 1))


def _apart(flush_registers: int, heads: int = 2, registers: int = 128) -> ReadConfig:
    """Readers of one warp, and chunk flushes of `heads` v-heads in a launch of their own."""
    return ReadConfig("gluon", 1, heads, 264, 1, heads, 4, flush_registers, registers)


def _kept(heads: int, registers: int = 128, rows: int = 0) -> ReadConfig:
    """The same with flushes that keep one head after the other in shared memory."""
    return ReadConfig("gluon", 1, 2, 264, 1, heads, 4, registers, 128, rows)


# (KDA, format read): up to how many v-heads in the batch, and the configuration for them. Measured on one H200 at
# batches 8 and 256 of 32 and 64 v-heads.
STEP = {
    (False, "nvfp4"): (*_small(2), (4096, _read(4, 2, 528, 2)), (1 << 40, _apart(168))),
    (False, "int8"): (*_small(2), (4096, _read(4, 2, 396, 2, 168)), (1 << 40, _apart(128))),
    (False, "fp8"): (*_small(2), (4096, _read(4, 2, 396, 2, 168)), (1 << 40, _apart(168))),
    (False, "bf16"): (*_small(1), (1 << 40, _read(4, 1, 264, 2))),
    (True, "bf16"): (*_small(1), (1 << 40, _read(4, 1, 528, 2))),
    **{
        (True, read): (*_small(1), (4096, _read(4, 1, 528, 2)), (1 << 40, _apart(168, 1, 168)))
        for read in ("int8", "fp8", "nvfp4")
    },
}
_KEPT = (*_small(2), (2048, _read(4, 2, 528, 2)), (4096, _kept(1)), (8192, _kept(2)))
# By checkpoint, GDN's nvfp4 copies beside rings of up to SHORT_RING_LEN rows. Measured at batches 128 and 256.
KEPT = {
    "fp32": (*_KEPT, (1 << 40, _kept(4, 168, 128))),
    **{checkpoint: (*_KEPT, (1 << 40, _kept(4))) for checkpoint in ("fp16", "bf16")},
}
SHORT_RING_LEN = 17
GLUON_RING_LEN = 33


@cache
def read_config(batch: int, shape: ReadShape) -> ReadConfig:
    """Configuration of the step with a read copy."""
    if not gluon_fits(shape):
        return PORTABLE
    # An fp8 checkpoint without a copy is read like a copy.
    table = STEP[shape.kda, "fp8" if shape.read == "none" else shape.read]
    short, heads = shape.ring_len <= SHORT_RING_LEN, batch * shape.num_v_heads
    if short and not shape.kda and shape.read == "nvfp4":
        table = KEPT.get(shape.checkpoint, table)
    config = next(config for most, config in table if heads <= most)
    if config.flush_warps and not short:
        # Fewer rows flush at once, with larger tables; readers hold more of the ring.
        together = 1 if heads <= 8192 else config.flush_heads
        config = replace(config, flush_heads=together, flush_registers=168, max_registers=168)
    group = shape.num_v_heads // shape.num_k_heads
    # The register caps were measured on sm90; elsewhere nothing may spill.
    if shape.arch != "sm90":
        config = replace(config, max_registers=240, flush_registers=240)
    return replace(config, heads=divisor(config.heads, group), flush_heads=divisor(config.flush_heads, group))


def gluon_fits(shape: ReadShape) -> bool:
    """Whether the Gluon kernel can serve a layer."""
    dims = shape.head_k_dim == 128 and shape.head_v_dim == 128 and shape.ring_len <= GLUON_RING_LEN
    return shape.arch in GLUON_ARCHS and shape.fast and dims and (shape.read != "none" or shape.checkpoint == "fp8")
