"""GDN and KDA windows whose flushes take the chunk form: single steps in float64's sight, states after many windows."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
from test_window_gpu import BUFFER_LEN, OWNED, SPECS, check, configuration, fill_u, make_case, name

from replayssm import GDNSpec, KDASpec, LayerSpec
from replayssm.ops.delta import reference

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DELTA = [spec for spec in SPECS if isinstance(spec, GDNSpec)]
TOKENS, WINDOWS, NUM_SLOTS = 4, 96, 5


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("spec", DELTA, ids=name)
def test_chunk_windows_against_float64(spec: LayerSpec, window: int, tree: bool) -> None:
    check(spec, make_case(spec, window, tree, BF16, FP32), replay="chunk")


@pytest.mark.parametrize(
    ("activation", "checkpoint"), [(BF16, BF16), (BF16, FP16), (FP16, FP16), (FP16, FP32)], ids=str
)
@pytest.mark.parametrize("spec", DELTA, ids=name)
def test_chunk_formats_against_float64(spec: LayerSpec, activation: torch.dtype, checkpoint: torch.dtype) -> None:
    for window in (4, 7):
        check(spec, make_case(spec, window, window == 7, activation, checkpoint), replay="chunk")


@pytest.mark.parametrize("activation", [BF16, FP16], ids=str)
@pytest.mark.parametrize("spec", DELTA, ids=name)
def test_keys_that_are_not_normed(spec: GDNSpec, activation: torch.dtype) -> None:
    """k and q as they come, k short enough for the recurrence to contract."""
    for window in (4, 8):
        case = make_case(spec, window, True, activation, FP32)
        for keys in (case.ring["k"], case.inputs["k"], case.inputs["q"]):
            keys *= spec.head_k_dim**-0.5
        for slot, (start, count, *_) in enumerate(case.rows[0].tolist()):
            if slot in OWNED:
                fill_u(slot, start, count, case.state, case.ring, norm=False)
        check(replace(spec, use_qk_l2norm=False), case, replay="chunk")


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
@pytest.mark.parametrize("spec", DELTA, ids=name)
def test_chunk_form_of_every_configuration(spec: LayerSpec, batch: int) -> None:
    """Results do not depend on the launch beyond the outputs' rounding."""
    for checkpoint in (FP32, BF16):
        config = configuration(spec, batch, checkpoint.itemsize)
        check(spec, make_case(spec, 4, True, BF16, checkpoint), config, replay="chunk")


@pytest.mark.parametrize("spec", DELTA, ids=name)
def test_identical_chunk_launches_are_bit_equal(spec: LayerSpec) -> None:
    case = make_case(spec, 6, True, BF16, FP32)
    runs = [check(spec, case, replay="chunk") for _ in range(3)]
    assert all(
        torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for r in runs[1:] for a, b in zip(runs[0], r, strict=True)
    )


def replayed(states: torch.Tensor, row: list[torch.Tensor], slot: int) -> torch.Tensor:
    """A slot's state after one more row (k, v, g and beta of all slots)."""
    k, v, g, beta = (t[slot] for t in row)
    return reference._update(states[slot], k, v, g, beta, True)[0]


def state_error(spec: GDNSpec, replay: str, decay: float, size: float) -> torch.Tensor:
    """Relative error of each head's state after WINDOWS flushes of full rings, against float64.

    Heads' log decays lie between decay / 1000 and 10 decay; some keys are alike, so that their products matter.
    """
    from replayssm.ops.delta.window_launch import delta_window

    generator = torch.Generator("cuda").manual_seed(1)
    HK, (HV, V, K) = spec.num_k_heads, spec.state_shape
    ring_len, kda = BUFFER_LEN + TOKENS, isinstance(spec, KDASpec)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device="cuda")

    def ring(field: Any) -> torch.Tensor:
        shape = (NUM_SLOTS, field.heads, ring_len, *(() if field.dim is None else (field.dim,)))
        return torch.full(shape, float("nan"), dtype=field.dtype or BF16, device="cuda")

    rings = [ring(field) for field in spec.ring_fields.values()]
    state = size * normal(NUM_SLOTS, HV, V, K)
    exact: torch.Tensor = state.double()
    pending: list[list[torch.Tensor]] = []
    cursors = torch.tensor([[3 * slot, 0, 1 << 30, 0] for slot in range(NUM_SLOTS)], dtype=torch.int32, device="cuda")
    slots = torch.arange(NUM_SLOTS, dtype=torch.int32, device="cuda")
    loc = torch.arange(0, NUM_SLOTS * TOKENS + 1, TOKENS, dtype=torch.int32, device="cuda")
    rates = decay * torch.logspace(-3, 1, HV, device="cuda").view(1, HV, *([1] if kda else []))
    tokens, committed = NUM_SLOTS * TOKENS, 0
    for step in range(WINDOWS * (BUFFER_LEN // TOKENS) + 1):
        q, k = (normal(tokens, HK, K).to(BF16) for _ in range(2))
        if step % 7 == 3:
            k = (0.1 * k + normal(1, HK, K)).to(BF16)
        v, g = normal(tokens, HV, V).to(BF16), -rates * normal(tokens, HV, *([K] if kda else [])).abs()
        beta = torch.rand(tokens, HV, generator=generator, device="cuda")
        given = (q, k, v, g, beta, None, None, state, *rings)
        inputs: tuple[Any, ...] = (*given, cursors, slots, loc, torch.empty_like(v))
        delta_window(
            *inputs,
            buffer_len=BUFFER_LEN,
            pad_slot_id=-1,
            scale=K**-0.5,
            use_qk_l2norm=True,
            lower_bound=None,
            max_window_len=TOKENS,
            replay=replay,
        )
        if committed + TOKENS > BUFFER_LEN:
            for row in pending:
                exact = torch.stack([replayed(exact, row, slot) for slot in range(NUM_SLOTS)])
            cursors[:, 0] = (cursors[:, 0] + committed) % ring_len
            pending, committed = [], 0
        by_slot = [t.view(NUM_SLOTS, TOKENS, *t.shape[1:]).double() for t in (k, v, g, beta)]
        pending += [[t[:, i] for t in by_slot] for i in range(TOKENS)]
        committed += TOKENS
        cursors[:, 1] = committed
    error: torch.Tensor = (state.double() - exact).flatten(2).norm(dim=2) / exact.flatten(2).norm(dim=2)
    return error


@pytest.mark.parametrize(("decay", "size"), [(0.1, 1.0), (0.001, 1.0), (0.001, 100.0), (2.0, 1.0)])
@pytest.mark.parametrize(
    "spec",
    [
        GDNSpec(num_k_heads=1, num_v_heads=4, head_k_dim=128, head_v_dim=128),
        KDASpec(num_k_heads=4, num_v_heads=4, head_k_dim=128, head_v_dim=128),
    ],
    ids=name,
)
def test_states_stay_as_accurate_as_stepwise(spec: GDNSpec, decay: float, size: float) -> None:
    """The chunk form's error is at most twice that of the serial form, which is stepwise decoding's arithmetic."""
    serial, chunk = (state_error(spec, replay, decay, size) for replay in ("serial", "chunk"))
    assert (chunk.mean(0) <= 2 * serial.mean(0)).all(), (serial.mean(0), chunk.mean(0))
