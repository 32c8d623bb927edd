"""CacheMemory: the tensors of a cache, and what happens to requests between their steps."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch

from replayssm import cursors as cursor_ops
from replayssm.checks import check_int, check_tensor, check_written, fail
from replayssm.config import Mamba2Spec
from replayssm.layer import LayerCache, allocate_layer, view_layer
from replayssm.plan import Plan
from replayssm.plan_checks import present_device
from replayssm.quant import as_indexable
from replayssm.seeds import Seeds, check_seeds, first_seeds, next_seeds
from replayssm.slots import Slots, integers, placed, slot_tensor

_EPOCHS = itertools.count(0, 2**32)  # of the first steps of caches, so that a step tells whose it is
STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class CacheMemory:
    """Checkpoints, read copies, rings, cursors and seeds of `num_slots` requests: load, reset, copy, materialize."""

    @torch.inference_mode(False)  # tensors made in that mode could not be written outside of it
    def __init__(
        self,
        plan: Plan,
        num_slots: int,
        *,
        layers: Mapping[int, Mapping[str, torch.Tensor]] | None = None,
        cursors: torch.Tensor | None = None,
        pad_slot_id: int = -1,
    ) -> None:
        """Allocate, or with `layers` take tensors that an engine owns.

        layers: layer_idx -> tensors by the names of `replayssm.layer.layer_shapes`, views with any slot stride.
        cursors: [num_slots, 4] int32, contiguous. pad_slot_id: the slot index of padding rows (-1, or 0 where an engine
        keeps block 0 for it); no request may have it, and slots outside 0 ... num_slots - 1 are padding too. Given
        tensors are taken as they are: call `load` before a slot's first step, or `reset` where checkpoints and read
        copies hold what they should.
        """
        plan.check_runnable()
        self.plan = plan
        self.num_slots = check_int("num_slots", num_slots, 1)
        self.pad_slot_id = check_int("pad_slot_id", pad_slot_id, -(2**31), 2**31 - 1)
        self.device = present_device(plan.device)
        specs = {spec.layer_idx: spec for spec in plan.layers}
        if layers is not None and set(layers) != set(specs):
            raise fail("layers", sorted(layers), f"the layer_idx of the plan: {sorted(specs)}")
        if cursors is None:
            cursors = torch.zeros(num_slots, 4, dtype=torch.int32, device=self.device)
            cursor_ops.reset(cursors, self._all(), plan.buffer_len, spread=plan.spreads(num_slots))
        check_tensor("cursors", cursors, (num_slots, 4), (torch.int32,), self.device, inner_contiguous=2)
        self.cursors = cursors
        self.seeds = first_seeds(plan.seed, num_slots, self.device) if plan.rounding == "stochastic" else None
        self._layers = {
            idx: allocate_layer(spec, plan, num_slots, cursors, self.seeds)
            if layers is None
            else view_layer(spec, plan, layers[idx], cursors, self.seeds)
            for idx, spec in specs.items()
        }
        self._epoch = next(_EPOCHS)

    def layer(self, layer_idx: int) -> LayerCache:
        """The tensors of one layer, as the step ops take them."""
        if layer_idx not in self._layers:
            raise fail("layer_idx", layer_idx, f"one of {sorted(self._layers)}")
        return self._layers[layer_idx]

    def bind(self, layer_idx: int, A: torch.Tensor) -> None:
        """Tell a Mamba-2 layer its decay rate A [num_heads] (negative), for replays before its first decode."""
        layer = self.layer(layer_idx)
        if not isinstance(layer.spec, Mamba2Spec):
            raise fail("layer_idx", layer_idx, "a Mamba-2 layer")
        check_tensor("A", A, (layer.spec.num_heads,), (torch.float32, torch.float64), self.device, inner_contiguous=0)
        layer.A = A.detach().clone()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, cursors and seeds included."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        own = [self.cursors] if self.seeds is None else [self.cursors, self.seeds]
        return [t for layer in self._layers.values() for t in layer.tensors()] + own

    def _all(self) -> torch.Tensor:
        slots = torch.arange(self.num_slots, device=self.device)
        return slots[slots != self.pad_slot_id]

    def _slots(self, slots: Slots, name: str = "slots", *, repeats: bool = False) -> torch.Tensor:
        index = slot_tensor(name, slots, self.num_slots, self.device, repeats=repeats, forbidden=self.pad_slot_id)
        return index.long()

    def load(self, slots: Slots, states: Mapping[int, torch.Tensor], *, seeds: Seeds | None = None) -> None:
        """Start requests: write every layer's state [n, heads, V, K] to `slots` [n] and empty their rings.

        States are rounded to the nearest that the checkpoint's format has. seeds: as in `reset`.
        """
        index = self._slots(slots)
        if set(states) != set(self._layers):
            raise fail("states", sorted(states), f"every layer_idx of the cache: {sorted(self._layers)}")
        for layer_idx, state in states.items():
            self._check_state(f"states[{layer_idx}]", layer_idx, index, state)
        chosen = self._check_seeds(seeds, index)
        for layer_idx, state in states.items():
            self._layers[layer_idx].load(index, state)
        self._reset(index, chosen)

    def load_layer(self, layer_idx: int, slots: Slots, state: torch.Tensor) -> None:
        """Write one layer's state [n, heads, V, K]; cursors stay (call `reset` once all layers are written)."""
        index = self._slots(slots)
        self._check_state("state", layer_idx, index, state)
        self._layers[layer_idx].load(index, state)

    def _check_state(self, name: str, layer_idx: int, slots: torch.Tensor, state: torch.Tensor) -> None:
        shape = (len(slots), *self.layer(layer_idx).spec.state_shape)
        check_tensor(name, state, shape, STATE_DTYPES, self.device, inner_contiguous=0)

    def reset(self, slots: Slots, *, seeds: Seeds | None = None) -> None:
        """Empty the rings of `slots` [n]; checkpoints and read copies stay as they are.

        With stochastic rounding each slot takes a new seed: of `seeds` [n] int64, for results that can be had again, or
        (None) one that follows from the plan's seed and how often the slot was emptied.
        """
        index = self._slots(slots)
        self._reset(index, self._check_seeds(seeds, index))

    def _check_seeds(self, seeds: Seeds | None, index: torch.Tensor) -> torch.Tensor | None:
        if self.seeds is None:
            if seeds is not None:
                raise fail("seeds", "given", "None with rounding 'nearest'")
            return None
        return next_seeds(self.seeds[index], index) if seeds is None else check_seeds(seeds, len(index), self.device)

    def _reset(self, index: torch.Tensor, seeds: torch.Tensor | None) -> None:
        cursor_ops.reset(self.cursors, index, self.plan.buffer_len, spread=self.plan.spreads(self.num_slots))
        if self.seeds is not None and seeds is not None:
            self.seeds[index] = seeds

    def flush(self, slots: Slots | None = None) -> None:
        """Replay the committed rows of `slots` (None: all, each loaded or reset once) into their checkpoints."""
        index = self._all() if slots is None else self._slots(slots)
        for layer in self._layers.values():
            layer.check_replayable()
        for layer in self._layers.values():
            layer.flush(index, self.pad_slot_id)
        cursor_ops.mark_flushed(self.cursors, index, self.plan.ring_len)
        self._epoch += 1

    def materialize(
        self,
        layer_idx: int,
        slots: Slots,
        num_tokens: torch.Tensor | Sequence[int] | None = None,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The plain state [n, heads, V, K] after the first `num_tokens` [n] committed rows (None: all of them).

        Nothing in the cache changes. out: where to write it (any dtype of a checkpoint); default a new fp32 tensor.
        """
        layer, index = self.layer(layer_idx), self._slots(slots, repeats=True)
        layer.check_replayable()
        shape = (len(index), *layer.spec.state_shape)
        if out is None:
            out = torch.empty(shape, dtype=torch.float32, device=self.device)
        check_tensor("out", out, shape, STATE_DTYPES, self.device, inner_contiguous=3)
        check_written("out", out)
        counts = None if num_tokens is None else self._check_counts(num_tokens, index)
        rows = torch.arange(len(index), dtype=torch.int32, device=self.device)
        layer.replay(index.int(), counts, out, rows, self.pad_slot_id)
        return out

    def _check_counts(self, num_tokens: torch.Tensor | Sequence[int], index: torch.Tensor) -> torch.Tensor:
        counts = integers("num_tokens", num_tokens, len(index))
        if self.device.type == counts.device.type == "cpu":
            committed = self.cursors[index, cursor_ops.NUM_COMMITTED]
            if bool(((counts < 0) | (counts > committed)).any()):
                raise fail("num_tokens", counts.tolist(), f"0 to num_committed of each slot: {committed.tolist()}")
        return placed("num_tokens", counts, self.device)

    def copy(self, src_slots: Slots, dst_slots: Slots) -> None:
        """Copy requests between slots, cursors and seeds included; sources are read before any destination is written.

        With stochastic rounding a copy rounds by the same random words as its source; `reset` gives it others.
        """
        src, dst = self._slots(src_slots, "src_slots", repeats=True), self._slots(dst_slots, "dst_slots")
        if len(src) != len(dst):
            raise fail("dst_slots", f"{len(dst)} slots", f"as many as src_slots ({len(src)})")
        for tensor in map(as_indexable, self._tensors()):
            tensor[dst] = tensor[src]
        self._epoch += 1
