"""LayerCache: the tensors of one layer, and replaying its ring."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from replayssm.checks import ReplayError, check_tensor, fail
from replayssm.config import LayerSpec, Mamba2Spec
from replayssm.ops.registry import FamilyOps, family_ops
from replayssm.plan import Plan


@dataclass
class LayerCache:
    """One layer's tensors: `state` [num_slots, heads, V, K] and `ring[name]` [num_slots, heads, ring_len(, dim)].

    A [num_heads] fp32 is Mamba-2's decay rate, which replaying needs: from `ReplayCache.bind` or the first decode.
    """

    spec: LayerSpec
    state: torch.Tensor
    ring: Mapping[str, torch.Tensor]
    cursors: torch.Tensor
    ops: FamilyOps
    A: torch.Tensor | None = None

    def tensors(self) -> Iterator[torch.Tensor]:
        """State and ring tensors."""
        yield self.state
        yield from self.ring.values()

    def check_replayable(self) -> None:
        """Raise if the decay rate that replaying needs is not known."""
        if isinstance(self.spec, Mamba2Spec) and self.A is None:
            raise ReplayError(f"A of layer {self.spec.layer_idx} is not known; allowed after bind(layer_idx, A)")

    def move_rows(self, slots: torch.Tensor, accepted_paths: torch.Tensor, pad_slot_id: int) -> None:
        """Bring the rows of accepted paths together; the cursors are still those of the step."""
        torch.ops.replayssm.move_rows(
            list(self.ring.values()), self.cursors, slots, accepted_paths, pad_slot_id=pad_slot_id
        )

    def replay(
        self,
        slots: torch.Tensor,
        num_tokens: torch.Tensor | None,
        dst: torch.Tensor,
        dst_indices: torch.Tensor,
        pad_slot_id: int,
    ) -> None:
        """Write the states of `slots` [n] int32 after `num_tokens` (None: all) committed rows to `dst[dst_indices]`."""
        ring, tail = self.ring, (self.cursors, slots, num_tokens, dst, dst_indices)
        if isinstance(self.spec, Mamba2Spec):
            rows = (ring["x"], ring["B"], ring["dt"])
            self.ops.materialize(self.A, self.state, *rows, *tail, pad_slot_id=pad_slot_id)
        else:
            rows_ = (ring["k"], ring["v"], ring["g"], ring["beta"])
            norm = self.spec.use_qk_l2norm
            self.ops.materialize(self.state, *rows_, *tail, pad_slot_id=pad_slot_id, use_qk_l2norm=norm)


def layer_shapes(spec: LayerSpec, plan: Plan) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape of one slot and dtype of a layer's tensors: "state" and every ring field."""
    shapes: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"state": (spec.state_shape, plan.checkpoint_dtype)}
    for name, field in spec.ring_fields.items():
        dims = () if field.dim is None else (field.dim,)
        shapes[name] = ((field.heads, plan.ring_len, *dims), field.dtype or plan.activation)
    return shapes


def allocate_layer(spec: LayerSpec, plan: Plan, num_slots: int, cursors: torch.Tensor) -> LayerCache:
    """A layer with zero states and rings of its own."""
    tensors = {
        name: torch.zeros(num_slots, *shape, dtype=dtype, device=cursors.device)
        for name, (shape, dtype) in layer_shapes(spec, plan).items()
    }
    layer = LayerCache(
        spec, tensors.pop("state"), tensors, cursors, family_ops(spec.family, plan.backend, cursors.device)
    )
    if isinstance(spec, Mamba2Spec):
        layer.A = torch.zeros(spec.num_heads, device=cursors.device)  # empty rings decay nothing
    return layer


def view_layer(spec: LayerSpec, plan: Plan, tensors: Mapping[str, torch.Tensor], cursors: torch.Tensor) -> LayerCache:
    """A layer over tensors that an engine owns: any slot stride, each slot contiguous inside."""
    shapes, label = layer_shapes(spec, plan), f"layers[{spec.layer_idx}]"
    if set(tensors) != set(shapes):
        raise fail(label, sorted(tensors), f"the names {sorted(shapes)}")
    for name, (shape, dtype) in shapes.items():
        full, inner = (len(cursors), *shape), len(shape)
        check_tensor(f"{label}[{name!r}]", tensors[name], full, (dtype,), cursors.device, inner_contiguous=inner)
    ring = {name: tensor for name, tensor in tensors.items() if name != "state"}
    return LayerCache(spec, tensors["state"], ring, cursors, family_ops(spec.family, plan.backend, cursors.device))
