"""Variant: what a run rounds, and how often."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from replayssm.checks import check_int, fail
from replayssm.formats import READ_FORMATS
from replayssm.quant import dequantize, quantize

FORMATS = ("fp32", "fp16", "bf16", "int8", "fp8", "nvfp4")
REFERENCE = "none/fp32@token"
OPTIONS = ("", "reordered", "stochastic")
NOISE = "none/fp32@token:reordered"
DEFAULTS = (
    NOISE,
    "none/fp32",
    "bf16/fp32",
    "int8/fp32",
    "fp8/fp32",
    "nvfp4/fp32",
    "nvfp4/fp32@64",
    "none/bf16",
    "none/bf16:stochastic",
    "none/bf16@token",
    "none/fp8",
    "none/fp8:stochastic",
    "none/fp8@token",
    "none/nvfp4",
    "none/nvfp4@token",
)


@dataclass(frozen=True)
class Variant:
    """One way to decode: format of the read copy and of the checkpoint, and after how many tokens both are written.

    Written `READ/CHECKPOINT`, then `@N` for a buffer_len of N tokens (default 16) or `@token` for ordinary decoding,
    which rounds the state after every token and has no read copy. `:reordered` sums over K in another order,
    `:stochastic` rounds the checkpoint up or down at random, once a window (fp16, bf16, fp8). READ may be one format a
    layer, in order: `int8+nvfp4+nvfp4`.
    """

    read: str
    checkpoint: str
    buffer_len: int = 16
    option: str = ""

    @classmethod
    def parse(cls, text: str) -> Variant:
        """The variant that `text` names."""
        body, _, option = text.partition(":")
        formats, _, often = body.partition("@")
        read, slash, checkpoint = formats.partition("/")
        if option not in OPTIONS or not slash or not (often in ("", "token") or often.isdecimal()):
            raise fail("variant", text, "READ/CHECKPOINT, READ/CHECKPOINT@N or none/CHECKPOINT@token")
        if not set(read.split("+")) <= set(READ_FORMATS) or checkpoint not in FORMATS:
            names = f"one of {', '.join(READ_FORMATS)} / one of {', '.join(FORMATS)}"
            raise fail("variant", text, names)
        if often == "token":
            if read != "none":
                raise fail("variant", text, f"none/{checkpoint}@token, since ordinary decoding has no read copy")
            if option == "stochastic":
                raise fail("variant", text, "stochastic rounding once a window")
            return cls(read, checkpoint, 1, option)
        buffer_len = check_int("buffer_len", int(often or 16), 2, 256)
        if 1024 % buffer_len:
            raise fail("buffer_len", buffer_len, "a divisor of 1024")
        if option == "stochastic" and checkpoint not in ("fp16", "bf16", "fp8"):
            raise fail("variant", text, "stochastic rounding of fp16, bf16 or fp8")
        return cls(read, checkpoint, buffer_len, option)

    def __str__(self) -> str:
        often = {1: "@token", 16: ""}.get(self.buffer_len, f"@{self.buffer_len}")
        return f"{self.read}/{self.checkpoint}{often}{':' if self.option else ''}{self.option}"

    @property
    def num_layers(self) -> int:
        """Number of layers that it names formats for; 1: the same for all."""
        return self.read.count("+") + 1

    def of_layer(self, index: int) -> Variant:
        """What the SSM layer of that number does."""
        return self if self.num_layers == 1 else replace(self, read=self.read.split("+")[index])

    def round_read(self, state: torch.Tensor) -> torch.Tensor:
        """What a read of the checkpoint `state` [heads, V, K] sees."""
        return state if self.read == "none" else dequantize(quantize(state, self.read))

    def round_checkpoint(self, state: torch.Tensor, words: torch.Tensor | None = None) -> torch.Tensor:
        """What memory holds once fp32 `state` [heads, V, K] is written; words: those of stochastic rounding."""
        return state if self.checkpoint == "fp32" else dequantize(quantize(state, self.checkpoint, words=words))
