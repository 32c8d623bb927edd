"""Two caches that decode the same tokens, one with read copies and one without, and what must hold between them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from families import RINGS, Case, cast, new_output, op_options, ordered_inputs, random_params, random_tokens

from replayssm import GDNSpec, KDASpec, LayerCache, Mamba2Spec, Plan, ReplayCache, Step, delta_decode, mamba2_decode
from replayssm.cursors import NUM_COMMITTED, flush_mask, real_slots
from replayssm.quant import dequantize, quantize

LAYERS = (
    Case("mamba2", Mamba2Spec(num_heads=4, head_dim=3, d_state=32, n_groups=2, layer_idx=0)),
    Case("gdn", GDNSpec(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=5, layer_idx=2)),
    Case("kda", KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=32, head_v_dim=4, lower_bound=-5.0, layer_idx=5)),
)
READS = ("bf16", "int8", "fp8", "nvfp4")
CHECKPOINTS = ("fp32", "fp16", "bf16", "fp8")
MIXED = {0: "nvfp4", 2: "int8", 5: "none"}


def formats_plan(**options: Any) -> Plan:
    defaults = {"buffer_len": 6, "num_draft_tokens": 3, "activation": torch.float32}
    return Plan(tuple(case.spec for case in LAYERS), **(defaults | options))


def fill(tensor: torch.Tensor) -> None:
    """NaN, or for codes that have none a pattern."""
    if tensor.is_floating_point():
        tensor.fill_(float("nan"))
    elif tensor.dtype in (torch.int8, torch.uint8):
        tensor.fill_(85)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit; all NaN alike."""
    sizes = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    bits = [t.contiguous().view(sizes[t.dtype.itemsize]) for t in (a, b)]
    nans = [t.float().isnan() for t in (a, b)]
    return torch.equal(nans[0], nans[1]) and torch.equal(*(t.masked_fill(nans[0], 0) for t in bits))


def stored_tensors(layer: LayerCache) -> list[torch.Tensor]:
    """What the recurrence needs of a layer: checkpoint and ring, `u` left out."""
    kept = [ring for name, ring in layer.ring.items() if layer.spec.ring_fields[name].recurrence]
    return [layer.state, *kept, *([] if layer.state_scales is None else [layer.state_scales])]


def check_read_copies(layer: LayerCache, slots: list[int]) -> None:
    """The copies of `slots` are those of their checkpoints as they are stored."""
    if layer.read_copy is None:
        return
    index = torch.tensor(slots)
    expected = quantize(layer.stored.checkpoint(index), layer.read_copy.format).tensors()
    got = layer.read_copy.gather(index).tensors()
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        assert same(got[name], tensor), (layer.read_copy.format, name)


@dataclass
class Pair:
    """`cache` has read copies, `plain` none; both hold the requests `owned`."""

    plan: Plan
    num_slots: int = 5
    seed: int = 0
    pad: int = -1
    owned: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.cache = ReplayCache(self.plan, self.num_slots, pad_slot_id=self.pad)
        self.plain = ReplayCache(self.plan.with_options(read="none"), self.num_slots, pad_slot_id=self.pad)
        for cache in (self.cache, self.plain):
            for case in LAYERS:
                for tensor in cache.layer(case.spec.layer_idx).tensors():
                    fill(tensor)
        self.params = [random_params(case, self.generator) for case in LAYERS]

    def load(self, slots: list[int]) -> None:
        states = {
            case.spec.layer_idx: torch.randn(len(slots), *case.spec.state_shape, generator=self.generator)
            for case in LAYERS
        }
        for cache in (self.cache, self.plain):
            cache.load(slots, states)
        self.owned = sorted({*self.owned, *slots})

    @property
    def requests(self) -> list[int]:
        """Slots that hold a request."""
        return self.owned

    def flush(self, slots: list[int] | None) -> None:
        self.both("flush", slots or self.owned)

    def copy(self, src: int, dst: int) -> None:
        self.both("copy", [src], [dst])
        self.owned = sorted([*self.owned, dst])

    def move(self, slot: int, back: int) -> None:
        """Preempt the request and resume it from its materialised state, in the slot `back`."""
        for cache in (self.cache, self.plain):
            cache.load([back], {c.spec.layer_idx: cache.materialize(c.spec.layer_idx, [slot]) for c in LAYERS})
        self.owned = sorted({*self.owned, back} - ({slot} - {back}))

    def finish(self, slot: int) -> None:
        self.owned.remove(slot)

    def both(self, name: str, *args: Any) -> None:
        for cache in (self.cache, self.plain):
            getattr(cache, name)(*args)

    def step(
        self,
        slots: list[int],
        lens: list[int] | None,
        accepted: list[int] | None,
        *,
        parents: list[list[int]] | None = None,
        paths: list[list[int]] | None = None,
    ) -> None:
        """One step of all layers of both caches."""
        options = {}
        if parents is not None:
            options["parents"] = torch.tensor([p for row in parents for p in row], dtype=torch.int32)
        windows = 1 if lens is None else lens
        steps = [cache.begin_step(slots, windows, **options) for cache in (self.cache, self.plain)]
        for i, case in enumerate(LAYERS):
            tokens = random_tokens(case, len(slots) if lens is None else sum(lens), self.generator)
            inputs = cast(tokens | self.params[i], torch.float32)
            layer = self.cache.layer(case.spec.layer_idx)
            before = {name: ring.clone() for name, ring in layer.ring.items()}
            out = decode(case, layer, steps[0], inputs)
            decode(case, self.plain.layer(case.spec.layer_idx), steps[1], inputs)
            expected, u = from_stored_bytes(case, layer, steps[0], inputs, before)
            assert torch.isfinite(out).all()
            assert torch.equal(out, expected), case
            if u is not None:
                assert same(layer.ring["u"], u)
        for cache, step in zip((self.cache, self.plain), steps, strict=True):
            cache.commit(step, accepted, accepted_paths=paths)

    def check(self) -> None:
        """Same checkpoints, rings and cursors in both caches; every copy that of its checkpoint."""
        assert torch.equal(self.cache.cursors, self.plain.cursors)
        for case in LAYERS:
            layer, plain = (cache.layer(case.spec.layer_idx) for cache in (self.cache, self.plain))
            for a, b in zip(stored_tensors(layer), stored_tensors(plain), strict=True):
                assert same(a, b), case
            if self.owned:
                check_read_copies(layer, self.owned)
                index = case.spec.layer_idx, self.owned
                assert torch.equal(self.cache.materialize(*index), self.plain.materialize(*index))


def decode(case: Case, layer: LayerCache, step: Step, inputs: dict[str, Any]) -> torch.Tensor:
    return (mamba2_decode if case.prefix == "mamba2" else delta_decode)(layer, step, **inputs)


def from_stored_bytes(
    case: Case, layer: LayerCache, step: Step, inputs: dict[str, Any], ring: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(outputs, ring of u) of a step that starts from what the copies stand for after it, without any copy.

    ring: what the rings held before. Rows that flushed have nothing committed, the others what they had.
    """
    stored, cursors = layer.stored, layer.cursors.clone()
    slots = step.slot_indices[real_slots(step.slot_indices, len(cursors), step.pad_slot_id)].long()
    lens = step.window_lens[real_slots(step.slot_indices, len(cursors), step.pad_slot_id)]
    flushed = slots[flush_mask(cursors[slots], lens, step.buffer_len)]
    first = cursors[flushed, 0] + cursors[flushed, NUM_COMMITTED]
    cursors[flushed, 0], cursors[flushed, NUM_COMMITTED] = first % layer.ring["B" if "B" in ring else "k"].shape[2], 0
    state = torch.full((len(cursors), *case.spec.state_shape), float("nan"))
    state[slots] = stored.for_reads(slots) if layer.read_copy is None else dequantize(layer.read_copy.gather(slots))
    args = ordered_inputs(case, inputs)
    out = new_output(case, len(args[0]), torch.float32)
    rows = (cursors, step.slot_indices, step.query_start_loc, out)
    limits = {"buffer_len": step.buffer_len, "pad_slot_id": step.pad_slot_id, "max_window_len": step.max_window_len}
    # A row that flushed must not do so again, and one that did not does not: nothing is committed, or there is room.
    rings = [ring[name] for name in RINGS[case.prefix]]
    layer.ops.step(*args, state, *rings, *rows, parents=step.parents, **limits, **op_options(case))
    return out, ring.get("u")
