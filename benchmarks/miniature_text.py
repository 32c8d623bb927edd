"""What the miniatures read in training: streams of whole modules, some passages of which come back later."""

from __future__ import annotations

import torch

from replayssm.drift.text import join, training_documents

REPEAT_SHARE, FRESH_SHARE = 0.25, 0.08


class Streams:
    """`rows` endless streams of documents, read in segments of `length` bytes and the one after."""

    def __init__(self, rows: int, length: int, seed: int) -> None:
        self._documents = training_documents()
        self._random = torch.Generator().manual_seed(seed)
        self._rows, self._length = rows, length
        self._texts = [torch.empty(0, dtype=torch.uint8)] * rows

    @property
    def size(self) -> int:
        """Bytes of all documents."""
        return sum(map(len, self._documents))

    def next(self) -> torch.Tensor:
        """The next segment [rows, length + 1] of every stream."""
        segments = torch.stack([self._segment(row) for row in range(self._rows)])
        return self._with_repeats(segments).long()

    def _segment(self, row: int) -> torch.Tensor:
        while len(self._texts[row]) <= self._length:
            order = torch.randperm(len(self._documents), generator=self._random)[:64]
            text = torch.frombuffer(bytearray(join([self._documents[i] for i in order])), dtype=torch.uint8)
            self._texts[row] = torch.cat((self._texts[row], text))
        segment, self._texts[row] = self._texts[row][: self._length + 1], self._texts[row][self._length :]
        return segment.clone()

    def _with_repeats(self, segments: torch.Tensor) -> torch.Tensor:
        for segment in segments:
            if torch.rand((), generator=self._random) < REPEAT_SHARE:
                size = self._number(64, min(512, self._length // 4))
                source = self._number(0, self._length - 2 * size)
                target = self._number(source + size, self._length - size)
                segment[target : target + size] = segment[source : source + size].clone()
        return segments

    def _number(self, low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (), generator=self._random))

    def kept(self) -> torch.Tensor:
        """Which rows go on from their states: all but a few, so that the model knows empty states too."""
        return (torch.rand(self._rows, generator=self._random) >= FRESH_SHARE).float()
