"""Which read format suits which layer: errors of what is read from captured states, and a choice within a budget."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from replayssm.checks import ReplayError, check_choice, check_tensor, fail
from replayssm.formats import CHECKPOINT_FORMATS, READ_FORMATS
from replayssm.quant import dequantize, quantize

RANDOM_QUERIES = 16  # a head, where none were captured
STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@dataclass
class LayerErrors:
    """Sums over what was added: of squared errors [heads] by format, and of the squares of the exact products."""

    shape: tuple[int, int, int]
    exact: torch.Tensor
    squares: dict[str, torch.Tensor]

    def relative(self, read: str) -> torch.Tensor:
        """Root-mean-square relative error of each head's products [heads]."""
        return (self.squares[read] / self.exact.clamp(min=1e-300)).sqrt()

    def mean(self, read: str) -> float:
        """Root mean square over the heads."""
        return float(self.relative(read).square().mean().sqrt())

    def worst(self, read: str) -> float:
        """The head with the largest error."""
        return float(self.relative(read).max())

    def nbytes(self, read: str, checkpoint: str = "fp32") -> int:
        """Bytes that a step reads of one request's state."""
        heads, V, K = self.shape
        stored = CHECKPOINT_FORMATS[checkpoint] if read == "none" else READ_FORMATS[read]
        return heads * stored.head_nbytes(V, K)


@dataclass
class ReadErrors:
    """Relative errors of outputs `S q` when S is read from a copy in each of `reads`, by layer_idx."""

    reads: Sequence[str] = ("nvfp4", "fp8", "int8", "bf16")
    seed: int = 0
    layers: dict[int, LayerErrors] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for read in self.reads:
            check_choice("reads", read, [name for name in READ_FORMATS if name != "none"])
        self._generator = torch.Generator().manual_seed(self.seed)

    def add(self, layer_idx: int, state: torch.Tensor, queries: torch.Tensor | None = None) -> None:
        """Count states [n, heads, V, K] of a layer, read by queries [n, groups, m, K] (None: random ones).

        Head h is read by group `h // (heads / groups)`. Formats that do not fit K are left out.
        """
        check_tensor(f"states[{layer_idx}]", state, (None, None, None, None), STATE_DTYPES, inner_contiguous=0)
        n, heads, V, K = state.shape
        S = state.double()
        if not bool(torch.isfinite(S).all()):
            raise fail(f"states[{layer_idx}]", "not finite", "finite states")
        if queries is None:
            q = torch.randn(n, heads, RANDOM_QUERIES, K, generator=self._generator).to(S)
        else:
            q = _per_head(layer_idx, queries, n, heads, K).to(S)
        mine = self.layers.setdefault(layer_idx, self._empty(heads, V, K))
        if mine.shape != (heads, V, K):
            raise fail(f"states[{layer_idx}].shape", list(state.shape), f"[any, {', '.join(map(str, mine.shape))}]")
        mine.exact += _squares(S, q)
        for read, squares in mine.squares.items():
            squares += _squares(dequantize(quantize(state, read)).double() - S, q)

    def _empty(self, heads: int, V: int, K: int) -> LayerErrors:
        fitting = [read for read in self.reads if READ_FORMATS[read].fits(K)]
        zeros = {read: torch.zeros(heads, dtype=torch.float64) for read in fitting}
        return LayerErrors((heads, V, K), torch.zeros(heads, dtype=torch.float64), zeros)

    def propose(self, budget: float, *, checkpoint: str = "fp32", worst_head: bool = False) -> dict[int, str]:
        """The read format of every layer, so that the root mean square of the layers' errors is at most `budget`.

        Starts from reading the checkpoint everywhere and takes, as long as the budget holds, the change of one layer
        that saves the most bytes for the squared error that it adds. worst_head: a layer's error is that of its worst
        head, not the root mean square over heads.
        """
        check_budget(budget, checkpoint)
        if not self.layers:
            raise ReplayError("states is empty; allowed: at least one layer's states")
        error = LayerErrors.worst if worst_head else LayerErrors.mean
        costs = {
            idx: {"none": (0.0, mine.nbytes("none", checkpoint))}
            | {read: (error(mine, read) ** 2, mine.nbytes(read)) for read in mine.squares}
            for idx, mine in sorted(self.layers.items())
        }
        return _spend(costs, budget**2 * len(costs))


def check_budget(budget: float, checkpoint: str) -> None:
    """Raise for what `ReadErrors.propose` does not take."""
    check_choice("checkpoint", checkpoint, CHECKPOINT_FORMATS)
    if not (isinstance(budget, (int, float)) and 0 <= budget < math.inf):
        raise fail("budget", budget, "a relative error >= 0, such as 0.03")


def _spend(costs: Mapping[int, Mapping[str, tuple[float, int]]], left: float) -> dict[int, str]:
    """The greedy choice: costs[layer][format] is (squared error, bytes), `left` the sum of squared errors allowed."""
    chosen = dict.fromkeys(costs, "none")
    while True:
        best, best_gain = None, 0.0
        for idx, formats in costs.items():
            error, nbytes = formats[chosen[idx]]
            for read, (new_error, new_bytes) in formats.items():
                added, saved = new_error - error, nbytes - new_bytes
                if saved > 0 and added <= left and saved / max(added, 1e-300) > best_gain:
                    best, best_gain = (idx, read, added), saved / max(added, 1e-300)
        if best is None:
            return chosen
        chosen[best[0]] = best[1]
        left -= best[2]


def _per_head(layer_idx: int, queries: torch.Tensor, n: int, heads: int, K: int) -> torch.Tensor:
    check_tensor(f"queries[{layer_idx}]", queries, (n, None, None, K), STATE_DTYPES, inner_contiguous=0)
    groups = queries.shape[1]
    if groups == 0 or heads % groups:
        raise fail(f"queries[{layer_idx}].shape", list(queries.shape), f"a divisor of {heads} heads in dimension 1")
    return queries.repeat_interleave(heads // groups, dim=1)


def _squares(S: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Sum of the squares of the products [heads], on the CPU."""
    return torch.einsum("nhvk,nhmk->nhmv", S, q).square().sum((0, 2, 3)).cpu()
