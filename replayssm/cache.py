"""ReplayCache: checkpoints and rings of every SSM layer, and the cursors that all layers share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from replayssm import cursors as cursor_ops
from replayssm.checks import ReplayError, check_int, check_tensor, fail
from replayssm.config import Mamba2Spec
from replayssm.cursors import Step
from replayssm.layer import LayerCache, allocate_layer, view_layer
from replayssm.plan import Plan
from replayssm.slots import Slots, check_accepted, check_windows, slot_tensor
from replayssm.trees import Paths, check_parents, check_paths, path_lens

STATE_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class ReplayCache:
    """Checkpoints, rings and cursors of `num_slots` requests.

    The order of use: load -> (begin_step -> decode of every layer -> commit)* -> materialize. All methods leave the
    cache unchanged when they raise.
    """

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

        layers: layer_idx -> {"state": ..., and one entry a ring field}, views with any slot stride. cursors:
        [num_slots, 4] int32, contiguous. pad_slot_id: the slot index of padding rows (-1, or 0 where an engine keeps
        block 0 for it); no request may have it, and slots outside 0 ... num_slots - 1 are padding too. Given tensors
        are taken as they are: call `reset` or `load` before a slot's first step.
        """
        plan.check_runnable()
        self.plan = plan
        self.num_slots = check_int("num_slots", num_slots, 1)
        self.pad_slot_id = check_int("pad_slot_id", pad_slot_id, -(2**31), 2**31 - 1)
        self.device = torch.empty(0, device=plan.device).device
        specs = {spec.layer_idx: spec for spec in plan.layers}
        if layers is not None and set(layers) != set(specs):
            raise fail("layers", sorted(layers), f"the layer_idx of the plan: {sorted(specs)}")
        if cursors is None:
            cursors = torch.zeros(num_slots, 4, dtype=torch.int32, device=self.device)
            cursor_ops.reset(cursors, self._all(), plan.buffer_len, spread=plan.spreads(num_slots))
        check_tensor("cursors", cursors, (num_slots, 4), (torch.int32,), self.device, inner_contiguous=2)
        self.cursors = cursors
        self._layers = {
            idx: allocate_layer(spec, plan, num_slots, cursors)
            if layers is None
            else view_layer(spec, plan, layers[idx], cursors)
            for idx, spec in specs.items()
        }
        self._epoch = 0
        self._engine_owned = layers is not None
        self._may_hold_rows = False  # what the host knows of the rings
        self._captured = False
        self._stepwise_batch = plan.stepwise_batch

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
        """Bytes of all tensors, cursors included."""
        return sum(t.numel() * t.element_size() for t in self._tensors())

    def _tensors(self) -> list[torch.Tensor]:
        return [t for layer in self._layers.values() for t in layer.tensors()] + [self.cursors]

    def _all(self) -> torch.Tensor:
        slots = torch.arange(self.num_slots, device=self.device)
        return slots[slots != self.pad_slot_id]

    def _slots(self, slots: Slots, name: str = "slots", *, repeats: bool = False) -> torch.Tensor:
        index = slot_tensor(name, slots, self.num_slots, self.device, repeats=repeats, forbidden=self.pad_slot_id)
        return index.long()

    def load(self, slots: Slots, states: Mapping[int, torch.Tensor]) -> None:
        """Start requests: write every layer's state [n, heads, V, K] to `slots` [n] and empty their rings."""
        index = self._slots(slots)
        if set(states) != set(self._layers):
            raise fail("states", sorted(states), f"every layer_idx of the cache: {sorted(self._layers)}")
        for layer_idx, state in states.items():
            self._check_state(f"states[{layer_idx}]", layer_idx, index, state)
        for layer_idx, state in states.items():
            self._layers[layer_idx].state[index] = state.to(self.plan.checkpoint_dtype)
        self.reset(index)

    def load_layer(self, layer_idx: int, slots: Slots, state: torch.Tensor) -> None:
        """Write one layer's state [n, heads, V, K]; cursors stay (call `reset` once all layers are written)."""
        index = self._slots(slots)
        self._check_state("state", layer_idx, index, state)
        self._layers[layer_idx].state[index] = state.to(self.plan.checkpoint_dtype)

    def _check_state(self, name: str, layer_idx: int, slots: torch.Tensor, state: torch.Tensor) -> None:
        shape = (len(slots), *self.layer(layer_idx).spec.state_shape)
        check_tensor(name, state, shape, STATE_DTYPES, self.device, inner_contiguous=0)

    def reset(self, slots: Slots) -> None:
        """Empty the rings of `slots`; checkpoints stay as they are."""
        index = self._slots(slots)
        cursor_ops.reset(self.cursors, index, self.plan.buffer_len, spread=self.plan.spreads(self.num_slots))

    def begin_step(
        self,
        slot_indices: Slots,
        window_lens: int | Sequence[int] = 1,
        *,
        query_start_loc: torch.Tensor | None = None,
        max_window_len: int | None = None,
        buffer_len: int | None = None,
        parents: torch.Tensor | Sequence[int] | None = None,
    ) -> Step:
        """Describe a step, without a host synchronisation and without changing the cache.

        slot_indices [batch]: the slot of every row, padding included. window_lens: tokens of every row (one number:
        the same for all; zero is allowed in a sequence). Or query_start_loc [batch + 1] int32 on the device with
        max_window_len. buffer_len: a lower one than the plan's for this step. parents [num_tokens] int32: windows are
        trees, and each token names an earlier one of its row's window, or -1 for the last committed token; commit such
        a step with accepted_paths.
        """
        slots = slot_tensor("slot_indices", slot_indices, self.num_slots, self.device, padding=self.pad_slot_id)
        limit = self.plan.buffer_len
        if buffer_len is not None:
            limit = check_int("buffer_len", buffer_len, 1, limit)
        longest = min(self.plan.max_window_len, limit)
        windows = check_windows(len(slots), window_lens, query_start_loc, max_window_len, longest, self.device)
        stepwise = buffer_len is None and self._goes_stepwise(len(slots), windows[1], parents is not None)
        step = Step(
            slots, *windows, buffer_len=limit, pad_slot_id=self.pad_slot_id, epoch=self._epoch, stepwise=stepwise
        )
        if parents is None:
            return step
        return replace(step, parents=check_parents(parents, step.window_lens, step.num_tokens, self.device))

    def _goes_stepwise(self, batch: int, window: int, is_tree: bool) -> bool:
        """Route a step; before the first stepwise one after others the rings are replayed, so that they are empty.

        A graph is replayed without the host, which from its capture on no longer knows what the rings hold: then only
        a plan with route "stepwise" leaves the ring out.
        """
        if window > 1 or is_tree or batch > self._stepwise_batch:
            return False
        if self.plan.route == "auto" and (self._captured or self._engine_owned or _is_capturing(self.device)):
            return False
        if self._may_hold_rows:
            self.flush()
            self._may_hold_rows = False
        return True

    def commit(
        self,
        step: Step,
        num_accepted_tokens: torch.Tensor | Sequence[int] | None = None,
        *,
        accepted_paths: Paths | None = None,
    ) -> None:
        """Accept the first `num_accepted_tokens` [batch] tokens of every window (None: all). Once a step.

        Or accept the tokens of accepted_paths [batch, depth]: indices in the window from a token without parent to its
        last accepted descendant, then -1. Rows of a path that are apart are moved together in every layer's ring.
        """
        if step.epoch != self._epoch:
            raise ReplayError("step is an earlier one; allowed: the last step, committed once")
        accepted = None if num_accepted_tokens is None else check_accepted(num_accepted_tokens, step, self.device)
        if accepted_paths is not None:
            if accepted is not None:
                raise fail("num_accepted_tokens", "given with accepted_paths", "one of them")
            paths = check_paths(accepted_paths, step, self.device)
            for layer in self._layers.values():
                layer.move_rows(step.slot_indices, paths, step.pad_slot_id)
            accepted = path_lens(paths)
        elif step.parents is not None:
            raise fail("accepted_paths", None, "the accepted path of every row, for a step with parents")
        if not step.stepwise:
            cursor_ops.commit(self.cursors, step, accepted, self.plan.ring_len)
            self._may_hold_rows = True
            self._captured = self._captured or _is_capturing(self.device)
        self._epoch += 1

    def take_back(self, slots: Slots, num_tokens: torch.Tensor | Sequence[int]) -> None:
        """Forget the last `num_tokens` [n] committed tokens of `slots` [n], which no flush may have replayed yet.

        A step never replays its own tokens, so those of the last step can always be taken back.
        """
        index = self._slots(slots)
        cursor_ops.take_back(self.cursors, index, self._check_counts(num_tokens, index))
        self._epoch += 1

    def flush(self, slots: Slots | None = None) -> None:
        """Replay the committed rows of `slots` (None: all, each loaded or reset once) into their checkpoints."""
        index = self._all() if slots is None else self._slots(slots)
        for layer in self._layers.values():
            layer.check_replayable()
        for layer in self._layers.values():
            layer.replay(index.int(), None, layer.state, index.int(), self.pad_slot_id)
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
        counts = None if num_tokens is None else self._check_counts(num_tokens, index)
        rows = torch.arange(len(index), dtype=torch.int32, device=self.device)
        layer.replay(index.int(), counts, out, rows, self.pad_slot_id)
        return out

    def _check_counts(self, num_tokens: torch.Tensor | Sequence[int], index: torch.Tensor) -> torch.Tensor:
        counts = torch.as_tensor(num_tokens, dtype=torch.int32, device=self.device)
        check_tensor("num_tokens", counts, (len(index),), (torch.int32,), self.device)
        if self.device.type == "cpu":
            committed = self.cursors[index, cursor_ops.NUM_COMMITTED]
            if bool(((counts < 0) | (counts > committed)).any()):
                raise fail("num_tokens", counts.tolist(), f"0 to num_committed of each slot: {committed.tolist()}")
        return counts

    def copy(self, src_slots: Slots, dst_slots: Slots) -> None:
        """Copy requests between slots, cursors included; sources are read before any destination is written."""
        src, dst = self._slots(src_slots, "src_slots", repeats=True), self._slots(dst_slots, "dst_slots")
        if len(src) != len(dst):
            raise fail("dst_slots", f"{len(dst)} slots", f"as many as src_slots ({len(src)})")
        for tensor in self._tensors():
            tensor[dst] = tensor[src]
        self._epoch += 1


def _is_capturing(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
