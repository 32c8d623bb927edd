"""Launch configurations of the Mamba-2 kernels with read copies: data, chosen from what the host knows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache


@dataclass(frozen=True)
class ReadConfig:
    """How the step kernel with a read copy is launched.

    kernel: "triton" (portable, a head a program) or "gluon". For Gluon: a flushing program replays one head of each row
    that flushes among `flush_rows` batch rows, and is every `every`-th of the grid's first programs (1: all of them); a
    reading program covers `tiles` tiles of 16 `num_warps` state rows of one batch row and group, `group` of them in
    flight, or if `depth` is not 0 that many stages of `group` tiles, in shared memory; at the end `appenders` programs
    a row write the new tokens. ahead: a reading program asks for its ring rows before anything is waited for.
    hint: it asks for what it will likely read before the kernel before is done, and then for all rows at once.
    """

    kernel: str
    num_warps: int
    tiles: int = 1
    group: int = 1
    depth: int = 0
    flush_rows: int = 1
    appenders: int = 1
    every: int = 1
    ahead: bool = True
    max_registers: int | None = None
    hint: bool = False

    def __str__(self) -> str:
        if self.kernel == "triton":
            return f"triton: a head a program, {self.num_warps} warps"
        return f"gluon: {self.tiles} x {16 * self.num_warps} state rows, {self.num_warps} warps"


@dataclass(frozen=True)
class ReadShape:
    """What a choice depends on besides the batch; `fast`: the arguments are such as the Gluon kernel takes."""

    num_heads: int
    n_groups: int
    head_dim: int
    d_state: int
    read: str
    checkpoint: str
    arch: str
    fast: bool = True


def fits(config: ReadConfig, shape: ReadShape) -> bool:
    """Whether a configuration of the Gluon kernel can serve a layer of this shape."""
    rows = shape.num_heads // shape.n_groups * shape.head_dim
    width = 1 << max((config.tiles + 1) // 2 - 1, 0).bit_length()
    return (
        shape.arch == "sm90"
        and shape.fast
        and shape.d_state in (64, 128, 256)
        and shape.head_dim % (4 * config.num_warps) == 0
        and rows % (16 * config.num_warps * config.tiles) == 0
        and config.tiles % config.group == 0
        and (config.group == 1 or shape.d_state <= 128)
        and shape.head_dim % width == 0
        and shape.num_heads % config.appenders == 0
    )


# Up to a batch, (warps, tiles, tiles in flight or a stage, stages) to try in order; the first that fits the layer is
# used. Measured on one H200. Four programs a multiprocessor have stages of nvfp4 in shared memory.
HINTED = 16  # the largest batch whose programs give hints
TINY = ((4, 2, 2, 1), (4, 3, 3, 1), (4, 1, 1, 1))
MIDDLE = ((4, 4, 2, 0), (4, 2, 2, 0), (4, 3, 1, 0), (4, 1, 1, 0))
LARGE = ((4, 16, 2, 0), (4, 15, 3, 0), (4, 8, 2, 0), (4, 5, 1, 0), *MIDDLE)
STEP = {
    "nvfp4": ((HINTED, TINY), (48, MIDDLE), (1 << 30, ((4, 16, 2, 3), (4, 15, 3, 2), (4, 8, 4, 0), *LARGE))),
    "": ((HINTED, TINY), (48, MIDDLE), (1 << 30, LARGE)),
}
# Up to a batch, by whether d_state is 256: small batches flush one row at a time, or all at once.
FLUSH_ROWS = {False: ((2, 1), (8, 2), (48, 4), (1 << 30, 16)), True: ((16, 1), (48, 4), (1 << 30, 16))}
# In a large batch, readers that move a byte an element leave processors to flushes beside them; nvfp4's do not.
EVERY = {"int8": 2, "fp8": 2}
WIDE = ((16, 8, 1, 0), (16, 4, 1, 0), (16, 2, 1, 0), (16, 1, 1, 0), (8, 1, 1, 0), (4, 1, 1, 0))  # d_state 256


@cache
def read_config(batch: int, shape: ReadShape) -> ReadConfig:
    """The step kernel's configuration."""
    table = STEP.get(shape.read, STEP[""])
    wide = shape.d_state > 128
    choices = (
        WIDE[0 if batch > 48 else 2 :] if wide else next(choices for largest, choices in table if batch <= largest)
    )
    flush_rows = next(rows for largest, rows in FLUSH_ROWS[wide] if batch <= largest)
    every = EVERY.get(shape.read, 1) if batch > 48 and not wide else 1
    # The rows' lines would find no room in what the shared memory of these flushes leaves of the L1 cache.
    ahead = shape.checkpoint != "fp8" or shape.head_dim * shape.d_state <= 8192
    for warps, tiles, group, depth in choices:
        registers, hint = None if wide else 128, batch <= HINTED and not wide
        config = ReadConfig("gluon", warps, tiles, group, depth, flush_rows, 4, every, ahead, registers, hint)
        if fits(config, shape):
            return config
    return portable_config(shape)


def portable_config(shape: ReadShape) -> ReadConfig:
    """The portable kernel's configuration: a head is one program's."""
    padded = (1 << (shape.head_dim - 1).bit_length()) * (1 << (shape.d_state - 1).bit_length())
    return ReadConfig("triton", min(max(padded // 1024, 4), 32))
