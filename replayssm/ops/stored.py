"""StoredState: a layer's checkpoint and read copy as the reference and torch ops read and write them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from replayssm.cursors import NUM_FLUSHES
from replayssm.ops.rows import compute_dtype
from replayssm.quant import QuantizedState, dequantize, quantize_into
from replayssm.rounding import random_words, round_stochastic

_READ_FORMATS = {
    torch.bfloat16: "bf16",
    torch.int8: "int8",
    torch.float8_e4m3fn: "fp8",
    torch.uint8: "nvfp4",
}


@dataclass(frozen=True)
class StoredState:
    """The tensors of a state [num_slots, heads, V, K].

    state: the checkpoint, a float tensor, or e4m3 codes with state_scales [num_slots, heads, V] fp32. read: what
    outputs are computed from; None: the checkpoint. seeds [num_slots] int64: round 16- and 8-bit checkpoints
    stochastically, with the number of flushes in `cursors` and `stream` (`replayssm.rounding`).
    """

    state: torch.Tensor
    state_scales: torch.Tensor | None = None
    read: QuantizedState | None = None
    seeds: torch.Tensor | None = None
    cursors: torch.Tensor | None = None
    stream: int = 0

    def checkpoint(self, slots: torch.Tensor) -> torch.Tensor:
        """The checkpoints of `slots` [n] int64, a new tensor in the dtype that ops compute in."""
        if self.state_scales is None:
            return self.state[slots].to(compute_dtype(self.state), copy=True)
        return dequantize(QuantizedState("fp8", self.state, self.state_scales).gather(slots))

    def for_reads(self, slots: torch.Tensor) -> torch.Tensor:
        """What outputs are computed from: the read copies of `slots` [n] int64, or their checkpoints."""
        if self.read is None:
            return self.checkpoint(slots)
        return dequantize(self.read.gather(slots)).to(compute_dtype(self.state))

    def write(self, slots: torch.Tensor, S: torch.Tensor, *, offset: int = 0) -> None:
        """Round S [n, heads, V, K] into the checkpoints of `slots` [n] int64, and renew their read copies from those.

        offset: added to the number of flushes that stochastic rounding counts by.
        """
        words = self._words(slots, tuple(S.shape[1:]), offset)
        if self.state_scales is not None:
            quantize_into(S, QuantizedState("fp8", self.state, self.state_scales), slots, words=words)
        elif words is None:
            self.state[slots] = S.to(self.state.dtype)
        else:
            self.state[slots] = round_stochastic(S, words, self.state.dtype)
        self.renew(slots)

    def renew(self, slots: torch.Tensor) -> None:
        """Quantise the checkpoints of `slots` [n] int64, as they are stored, into their read copies."""
        if self.read is not None:
            quantize_into(self.checkpoint(slots), self.read, slots)

    def _words(self, slots: torch.Tensor, shape: tuple[int, ...], offset: int) -> torch.Tensor | None:
        if self.seeds is None or self.state.dtype in (torch.float32, torch.float64):
            return None
        assert self.cursors is not None
        flushes = self.cursors[slots, NUM_FLUSHES] + offset
        return random_words(self.seeds[slots], flushes, shape, stream=self.stream)


def read_copy(
    codes: torch.Tensor | None, scales: torch.Tensor | None, global_scale: torch.Tensor | None
) -> QuantizedState | None:
    """The read copy that an op's arguments stand for; its format follows from the dtype of the codes."""
    return None if codes is None else QuantizedState(_READ_FORMATS[codes.dtype], codes, scales, global_scale)
