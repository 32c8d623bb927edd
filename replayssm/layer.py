"""LayerCache: the tensors of one layer; rounding a state into them, and replaying its ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayssm.checks import ReplayError, check_tensor, check_written, fail
from replayssm.config import LayerSpec, Mamba2Spec
from replayssm.cursors import real_slots
from replayssm.ops.registry import FamilyOps, family_ops
from replayssm.ops.stored import StoredState
from replayssm.plan import Plan
from replayssm.quant import QuantizedState, dequantize, layout

_ELEMENTS = 2**24  # of states that are rounded to low-precision formats at a time
_READ_NAMES = {"read_codes": "codes", "read_scales": "scales", "read_global": "global_scale"}


@dataclass
class LayerCache:
    """One layer's tensors: `state` [num_slots, heads, V, K] and `ring[name]` [num_slots, heads, ring_len(, dim)].

    A [num_heads] fp32 is Mamba-2's decay rate, which replaying needs: from `ReplayCache.bind` or the first decode.
    read_copy: what outputs are computed from (None: the checkpoint). state_scales [num_slots, heads, V] fp32: `state`
    holds e4m3 codes. seeds [num_slots] int64: flushes round stochastically. replay_form: `Plan.replay_form`.
    buffer_len: the plan's, which a step may lower.
    """

    spec: LayerSpec
    state: torch.Tensor
    ring: Mapping[str, torch.Tensor]
    cursors: torch.Tensor
    ops: FamilyOps
    A: torch.Tensor | None = None
    read_copy: QuantizedState | None = None
    state_scales: torch.Tensor | None = None
    seeds: torch.Tensor | None = None
    replay_form: str = "serial"
    buffer_len: int = 0

    def tensors(self) -> Iterator[torch.Tensor]:
        """State, ring and read copy."""
        yield self.state
        yield from self.ring.values()
        yield from (t for t in self.op_formats().values() if isinstance(t, torch.Tensor) and t is not self.seeds)

    def op_formats(self) -> dict[str, Any]:
        """The arguments of the step op that say how the state is stored and replayed, where it is not the plain way."""
        given: dict[str, Any] = {}
        if self.read_copy is not None:
            given = {name: getattr(self.read_copy, part) for name, part in _READ_NAMES.items()}
        if self.state_scales is not None:
            given["state_scales"] = self.state_scales
        if self.seeds is not None:
            given |= {"seeds": self.seeds, "stream": self.spec.layer_idx}
        if self.replay_form != "serial":
            given["replay"] = self.replay_form
        return given

    @property
    def stored(self) -> StoredState:
        """Checkpoint and read copy, to read and write them."""
        rounding = (self.seeds, self.cursors, self.spec.layer_idx)
        return StoredState(self.state, self.state_scales, self.read_copy, *rounding)

    def load(self, slots: torch.Tensor, state: torch.Tensor) -> None:
        """Round a state [n, heads, V, K] to the nearest into the checkpoints and read copies of `slots` [n] int64."""
        stored, some = replace(self.stored, seeds=None), self._slots_at_a_time()
        for part, values in zip(slots.split(some), state.split(some), strict=True):
            stored.write(part, values)

    def _slots_at_a_time(self) -> int:
        """How many slots are rounded together: quantising takes many times the memory of their states."""
        if self.read_copy is None and self.state_scales is None and self.seeds is None:
            return max(1, len(self.state))
        return max(1, _ELEMENTS // self.state[0].numel())

    def plain_state(self) -> torch.Tensor:
        """Every slot's checkpoint [num_slots, heads, V, K] in fp32: the memory itself where that is fp32."""
        if self.state_scales is None:
            return self.state.float()
        return dequantize(QuantizedState("fp8", self.state, self.state_scales))

    def check_replayable(self) -> None:
        """Raise if the decay rate that replaying needs is not known."""
        if isinstance(self.spec, Mamba2Spec) and self.A is None:
            raise ReplayError(f"A of layer {self.spec.layer_idx} is not known; allowed after bind(layer_idx, A)")

    def flush(self, slots: torch.Tensor, pad_slot_id: int) -> None:
        """Replay all committed rows of `slots` [n] int64 into their checkpoints; the caller moves the cursors."""
        in_place = self.state_scales is None and self.seeds is None
        if in_place:
            self.replay(slots.int(), None, self.state, slots.int(), pad_slot_id)
        if in_place and self.read_copy is None:
            return
        for some in slots.split(self._slots_at_a_time()):
            if in_place:
                self.stored.renew(some)
                continue
            S = torch.empty(len(some), *self.spec.state_shape, device=some.device)
            rows = torch.arange(len(some), dtype=torch.int32, device=some.device)
            self.replay(some.int(), None, S, rows, pad_slot_id)
            self.stored.write(some, S)

    def replay(
        self,
        slots: torch.Tensor,
        num_tokens: torch.Tensor | None,
        dst: torch.Tensor,
        dst_indices: torch.Tensor,
        pad_slot_id: int,
    ) -> None:
        """Write the states of `slots` [n] int32 after `num_tokens` (None: all) committed rows to `dst[dst_indices]`."""
        layer = self
        if self.state_scales is not None:
            real = real_slots(slots, len(self.state), pad_slot_id)
            layer = self._gathered(torch.where(real, slots, 0).long())
            rows = torch.arange(len(slots), dtype=torch.int32, device=slots.device)
            slots, pad_slot_id = torch.where(real, rows, -1), -1
        ring, tail = layer.ring, (layer.cursors, slots, num_tokens, dst, dst_indices)
        if isinstance(self.spec, Mamba2Spec):
            kept = (ring["x"], ring["B"], ring["dt"])
            self.ops.materialize(self.A, layer.state, *kept, *tail, pad_slot_id=pad_slot_id)
        else:
            kept_ = (ring["k"], ring["v"], ring["g"], ring["beta"])
            norm = self.spec.use_qk_l2norm
            self.ops.materialize(layer.state, *kept_, *tail, pad_slot_id=pad_slot_id, use_qk_l2norm=norm)

    def _gathered(self, slots: torch.Tensor) -> LayerCache:
        """A copy of `slots` [n] int64 with fp32 states: the replaying op knows no scales."""
        ring = {name: tensor[slots] for name, tensor in self.ring.items()}
        state, cursors = self.stored.checkpoint(slots), self.cursors[slots]
        return replace(self, state=state, ring=ring, cursors=cursors, read_copy=None, state_scales=None, seeds=None)


def layer_shapes(spec: LayerSpec, plan: Plan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape of one slot and dtype of a layer's tensors.

    "state" and every ring field; with a read copy "read_codes", and what its format has of "read_scales" and
    "read_global"; for an fp8 checkpoint "state_scales".
    """
    checkpoint = layout(plan.checkpoint, spec.state_shape)
    shapes = {"state": checkpoint["codes"]}
    for name, field in spec.ring_fields.items():
        dims = () if field.dim is None else (field.dim,)
        shapes[name] = ((field.heads, plan.ring_len, *dims), field.dtype or plan.activation)
    if (read := plan.read_format(spec.layer_idx)) != "none":
        copy = layout(read, spec.state_shape)
        shapes |= {name: copy[part] for name, part in _READ_NAMES.items() if part in copy}
    if "scales" in checkpoint:
        shapes["state_scales"] = checkpoint["scales"]
    return shapes


def allocate_layer(
    spec: LayerSpec, plan: Plan, num_slots: int, cursors: torch.Tensor, seeds: torch.Tensor | None = None
) -> LayerCache:
    """A layer with zero states and rings of its own."""
    tensors = {
        name: torch.zeros(num_slots, *shape, dtype=dtype, device=cursors.device)
        for name, (shape, dtype) in layer_shapes(spec, plan).items()
    }
    layer = _layer(spec, plan, tensors, cursors, seeds)
    if isinstance(spec, Mamba2Spec):
        layer.A = torch.zeros(spec.num_heads, device=cursors.device)  # empty rings decay nothing
    return layer


def view_layer(
    spec: LayerSpec,
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    cursors: torch.Tensor,
    seeds: torch.Tensor | None = None,
) -> LayerCache:
    """A layer over tensors that an engine owns: any slot stride, each slot contiguous inside."""
    shapes, label = layer_shapes(spec, plan), f"layers[{spec.layer_idx}]"
    if set(tensors) != set(shapes):
        raise fail(label, sorted(tensors), f"the names {sorted(shapes)}")
    for name, (shape, dtype) in shapes.items():
        full, inner = (len(cursors), *shape), len(shape)
        check_tensor(f"{label}[{name!r}]", tensors[name], full, (dtype,), cursors.device, inner_contiguous=inner)
        check_written(f"{label}[{name!r}]", tensors[name])
    return _layer(spec, plan, tensors, cursors, seeds)


def _layer(
    spec: LayerSpec,
    plan: Plan,
    tensors: Mapping[str, torch.Tensor],
    cursors: torch.Tensor,
    seeds: torch.Tensor | None,
) -> LayerCache:
    ring = {name: tensors[name] for name in spec.ring_fields}
    copy = {part: tensors[name] for name, part in _READ_NAMES.items() if name in tensors}
    return LayerCache(
        spec,
        tensors["state"],
        ring,
        cursors,
        family_ops(spec.family, plan.backend, cursors.device),
        read_copy=QuantizedState(plan.read_format(spec.layer_idx), **copy) if copy else None,
        state_scales=tensors.get("state_scales"),
        seeds=seeds,
        replay_form=plan.replay_form(spec.layer_idx),
        buffer_len=plan.buffer_len,
    )
