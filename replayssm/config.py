"""LayerSpec: family and dimensions of one SSM layer, in the field's own names."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch

from replayssm.checks import ReplayError, check_choice, check_int, fail

Family = Literal["mamba2", "gdn", "kda"]


@dataclass(frozen=True)
class RingField:
    """One tensor of the ring: `[num_slots, heads, ring_len]`, or `[num_slots, heads, ring_len, dim]` if `dim`.

    `dtype` None stands for the activation dtype. `recurrence` is False for what only reads use.
    """

    heads: int
    dim: int | None
    dtype: torch.dtype | None = None
    recurrence: bool = True


@dataclass(frozen=True)
class Mamba2Spec:
    """A Mamba-2 layer: state `[num_heads, head_dim, d_state]`, head h reads group `h // (num_heads / n_groups)`."""

    num_heads: int
    head_dim: int
    d_state: int
    n_groups: int
    conv_kernel: int = 4
    layer_idx: int = 0
    family: ClassVar[Family] = "mamba2"

    def __post_init__(self) -> None:
        _check_dims(self, ("num_heads", "head_dim", "d_state", "n_groups", "conv_kernel"))
        _check_divides("n_groups", self.n_groups, "num_heads", self.num_heads)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(heads, V, K) of one slot's state."""
        return self.num_heads, self.head_dim, self.d_state

    @property
    def ring_fields(self) -> dict[str, RingField]:
        """What one ring row holds: x and B as they come, dt after softplus."""
        return {
            "x": RingField(self.num_heads, self.head_dim),
            "B": RingField(self.n_groups, self.d_state),
            "dt": RingField(self.num_heads, None, torch.float32),
        }

    def shard(self, tp: int) -> Mamba2Spec:
        """The part of this layer on one of `tp` tensor-parallel ranks (fewer groups than ranks: each keeps a copy)."""
        _check_tp(tp, self.num_heads, self.n_groups)
        return replace(self, num_heads=self.num_heads // tp, n_groups=max(1, self.n_groups // tp))


@dataclass(frozen=True)
class GDNSpec:
    """A Gated DeltaNet layer: state `[num_v_heads, head_v_dim, head_k_dim]`, one decay a v-head and token.

    use_qk_l2norm: q and k are L2-normalised inside the op.
    """

    num_k_heads: int
    num_v_heads: int
    head_k_dim: int
    head_v_dim: int
    conv_kernel: int = 4
    layer_idx: int = 0
    use_qk_l2norm: bool = True
    family: ClassVar[Family] = "gdn"

    def __post_init__(self) -> None:
        _check_dims(self, ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel"))
        _check_divides("num_k_heads", self.num_k_heads, "num_v_heads", self.num_v_heads)
        check_choice("use_qk_l2norm", self.use_qk_l2norm, (True, False))

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """(heads, V, K) of one slot's state."""
        return self.num_v_heads, self.head_v_dim, self.head_k_dim

    @property
    def ring_fields(self) -> dict[str, RingField]:
        """What one ring row holds: raw k and v, processed gates, and u for reads."""
        return {
            "k": RingField(self.num_k_heads, self.head_k_dim),
            "v": RingField(self.num_v_heads, self.head_v_dim),
            "u": RingField(self.num_v_heads, self.head_v_dim, recurrence=False),
            "g": RingField(self.num_v_heads, self._gate_dim, torch.float32),
            "beta": RingField(self.num_v_heads, None, torch.float32),
        }

    @property
    def _gate_dim(self) -> int | None:
        return None

    def shard(self, tp: int) -> GDNSpec:
        """The part of this layer on one of `tp` tensor-parallel ranks."""
        _check_tp(tp, self.num_v_heads, self.num_k_heads, replicate=False)
        return replace(self, num_k_heads=self.num_k_heads // tp, num_v_heads=self.num_v_heads // tp)


@dataclass(frozen=True)
class KDASpec(GDNSpec):
    """A Kimi Delta Attention layer: GDN with a decay for every one of the K columns.

    Log decay `-exp(A_log) softplus(f + dt_bias)`; with a lower_bound `lower_bound sigmoid(exp(A_log)(f + dt_bias))`.
    """

    lower_bound: float | None = None
    family: ClassVar[Family] = "kda"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_k_heads != self.num_v_heads:
            raise ReplayError(f"num_k_heads is {self.num_k_heads}; allowed for kda: num_v_heads ({self.num_v_heads})")
        bound = self.lower_bound
        if bound is not None and not (isinstance(bound, (int, float)) and -100.0 <= bound < 0.0):
            raise fail("lower_bound", bound, "None or a number from -100 to below 0")

    @property
    def _gate_dim(self) -> int | None:
        return self.head_k_dim


LayerSpec = Mamba2Spec | GDNSpec | KDASpec


def _check_dims(spec: LayerSpec, names: tuple[str, ...]) -> None:
    for name in names:
        check_int(name, getattr(spec, name), 1)
    check_int("layer_idx", spec.layer_idx, 0)


def _check_divides(name: str, divisor: int, of_name: str, of: int) -> None:
    if of % divisor:
        raise ReplayError(f"{name} is {divisor}; allowed: a divisor of {of_name} ({of})")


def _check_tp(tp: int, heads: int, groups: int, *, replicate: bool = True) -> None:
    check_int("tp", tp, 1)

    def works(n: int) -> bool:
        return heads % n == 0 and (groups % n == 0 or (replicate and n % groups == 0))

    if not works(tp):
        sizes = [n for n in range(1, heads + 1) if works(n)]
        raise ReplayError(f"tp is {tp}; allowed for {heads} heads and {groups} groups: {', '.join(map(str, sizes))}")
