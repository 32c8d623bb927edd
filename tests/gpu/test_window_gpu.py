"""Window kernels on a GPU against the plain recurrence in float64: every launch, chains and trees, ragged windows."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from replayssm import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
from replayssm.cursors import must_flush
from replayssm.ops.delta import reference as delta_reference
from replayssm.ops.mamba2 import reference as mamba2_reference
from replayssm.workload import op_options, positional, random_inputs, random_parameters

pytestmark = pytest.mark.gpu
BUFFER_LEN, NUM_SLOTS = 16, 15
OWNED = [5, 0, 3, 2, 7, 9, 11, 12, 13, 1]
SPECS = (
    Mamba2Spec(num_heads=16, head_dim=64, d_state=128, n_groups=2),
    Mamba2Spec(num_heads=12, head_dim=80, d_state=128, n_groups=1),
    Mamba2Spec(num_heads=6, head_dim=128, d_state=256, n_groups=1),
    GDNSpec(num_k_heads=2, num_v_heads=8, head_k_dim=128, head_v_dim=128),
    GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=64, head_v_dim=64),
    KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=128, head_v_dim=128),
    KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=128, head_v_dim=128, lower_bound=-5.0),
)


@dataclass
class Case:
    """One step: states and rings (poisoned where dead), inputs, and the rows of the batch."""

    state: torch.Tensor
    ring: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    rows: tuple[torch.Tensor, torch.Tensor, torch.Tensor]
    parents: torch.Tensor | None
    flushed: list[int]
    buffer_len: int = BUFFER_LEN


def name(spec: LayerSpec) -> str:
    return f"{spec.family}-{'x'.join(map(str, spec.state_shape))}"


def make_case(
    spec: LayerSpec,
    window: int,
    tree: bool,
    activation: torch.dtype,
    checkpoint: torch.dtype,
    held: int | None = None,
    buffer_len: int = BUFFER_LEN,
) -> Case:
    """held: the most committed rows; more than buffer_len where the step's limit was lowered."""
    generator, pick = torch.Generator().manual_seed(window), random.Random(window)
    held, L = held or buffer_len, buffer_len
    ring_len = held + window
    lens = [window, window, 0, pick.randint(1, window), window, 1, 0, window, pick.randint(1, window), window]
    committed = [held, 8, 5, L - window, L + 1 - window, 0, 9, min(3, L - window), held - 1, 0]
    limits = [L, L, L, L, L, L, 4, 99, L, 1]
    state = torch.randn(NUM_SLOTS, *spec.state_shape, generator=generator).to(checkpoint)
    ring = {}
    for field_name, field in spec.ring_fields.items():
        shape = (NUM_SLOTS, field.heads, ring_len, *(() if field.dim is None else (field.dim,)))
        values = torch.randn(shape, generator=generator)
        scaled = {"dt": values.abs() / 20, "g": -values.abs() / 10, "beta": values.sigmoid()}
        ring[field_name] = scaled.get(field_name, values).to(torch.float32 if field.dtype else activation)
    cursors = torch.full((NUM_SLOTS, 4), -7, dtype=torch.int32)
    dead = [slot for slot in range(NUM_SLOTS) if slot not in OWNED]
    for tensor in (state, *ring.values()):
        tensor[dead] = float("nan")
    for slot, count, limit in zip(OWNED, committed, limits, strict=True):
        start = pick.randrange(ring_len)
        cursors[slot] = torch.tensor([start, count, limit, 0])
        for values in ring.values():
            values[slot, :, [(start + j) % ring_len for j in range(count, ring_len)]] = float("nan")
        if "u" in ring:
            fill_u(slot, start, count, state, ring)
    flushed = [
        slot
        for slot, count, length, limit in zip(OWNED, committed, lens, limits, strict=True)
        if must_flush(count, length, buffer_len, limit)
    ]
    slots = torch.tensor([*OWNED[:3], -1, *OWNED[3:]], dtype=torch.int32)
    lens.insert(3, 2)
    loc = torch.tensor([0, *lens]).cumsum(0).int()
    parents = torch.tensor([pick.randint(-1, i - 1) for n in lens for i in range(n)], dtype=torch.int32)
    inputs = random_inputs(spec, sum(lens), activation, generator) | random_parameters(spec, generator)
    return Case(state, ring, inputs, (cursors, slots, loc), parents if tree else None, flushed, buffer_len)


def fill_u(
    slot: int, start: int, count: int, state: torch.Tensor, ring: dict[str, torch.Tensor], norm: bool = True
) -> None:
    """u of the committed rows as the recurrence gives them: kernels read them, the reference does not."""
    S = state[slot].double()
    for j in range(count):
        at = (start + j) % ring["u"].shape[2]
        row = (ring[n][slot, :, at] for n in ("k", "v", "g", "beta"))
        S, u = delta_reference._update(S, *row, norm)
        ring["u"][slot, :, at] = u.to(ring["u"].dtype)


def run(
    step: object, spec: LayerSpec, case: Case, device: str, exact: bool, config: object = None, **options: object
) -> list[torch.Tensor]:
    """Outputs, state and ring tensors after one step; `exact`: in float64, without the launcher's own options."""

    def place(t: torch.Tensor | None) -> torch.Tensor | None:
        return None if t is None else (t.double() if exact and t.is_floating_point() else t).to(device, copy=True)

    state, ring = place(case.state), {n: place(t) for n, t in case.ring.items()}
    cursors, slots, loc = (place(t) for t in case.rows)
    inputs = {n: place(t) for n, t in case.inputs.items()}
    out = torch.full((int(loc[-1]), *spec.state_shape[:2]), float("nan"), device=device)
    out = out.double() if exact else out.to(next(iter(case.inputs.values())).dtype)
    step(
        *(*positional(spec, inputs), state, *ring.values(), cursors, slots, loc, out),
        buffer_len=case.buffer_len,
        pad_slot_id=-1,
        max_window_len=int(case.rows[2].diff().max()),
        parents=place(case.parents),
        **op_options(spec),
        **({} if exact else {"config": config, **options}),
    )
    return [t.cpu() for t in (out, state, *ring.values())]


def error(value: torch.Tensor, expected: torch.Tensor) -> float:
    return float((value.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-30))


def check(spec: LayerSpec, case: Case, config: object = None, **options: object) -> list[torch.Tensor]:
    from replayssm.ops.delta.window_launch import delta_window
    from replayssm.ops.mamba2.window_launch import mamba2_window

    mamba = spec.family == "mamba2"
    exact = run(mamba2_reference.mamba2_step if mamba else delta_reference.delta_step, spec, case, "cpu", True)
    got = run(mamba2_window if mamba else delta_window, spec, case, "cuda", False, config, **options)
    act, checkpoint = torch.finfo(got[0].dtype).eps, torch.finfo(case.state.dtype).eps
    loc = case.rows[2].tolist()
    assert torch.isfinite(got[0]).all()
    for row, slot in enumerate(case.rows[1].tolist()):
        tokens = slice(loc[row], loc[row + 1])
        if slot < 0:
            assert (got[0][tokens] == 0).all()
        elif loc[row] < loc[row + 1]:
            # Rounded outputs; after a flush also of the rounded checkpoint; tf32 or fp32 products under both.
            assert (
                error(got[0][tokens], exact[0][tokens])
                < 2 * act + (2 * checkpoint if slot in case.flushed else 0) + 2e-6
            )
    kept = [slot for slot in range(NUM_SLOTS) if slot not in case.flushed]
    assert error(got[1][case.flushed], exact[1][case.flushed]) < 2 * checkpoint + 2e-6
    assert torch.equal(got[1][kept].nan_to_num(3.0), case.state[kept].nan_to_num(3.0))
    for mine, expected in zip(got[2:], exact[2:], strict=True):
        there = expected.isfinite()
        assert torch.equal(mine.isfinite(), there)
        assert error(mine[there], expected[there]) < 2 * torch.finfo(mine.dtype).eps + 2e-6
    return got


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [1, 2, 4, 6, 8, 11, 16])
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_windows_against_float64(spec: LayerSpec, window: int, tree: bool) -> None:
    check(spec, make_case(spec, window, tree, torch.bfloat16, torch.float32))


@pytest.mark.parametrize(
    ("activation", "checkpoint"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.bfloat16, torch.float16),
        (torch.float16, torch.float16),
        (torch.float32, torch.float32),
    ],
    ids=str,
)
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_formats_against_float64(spec: LayerSpec, activation: torch.dtype, checkpoint: torch.dtype) -> None:
    for window in (4, 7):
        check(spec, make_case(spec, window, window == 7, activation, checkpoint))


@pytest.mark.parametrize("batch", [1, 8, 64, 256])
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_every_configuration_of_the_tables(spec: LayerSpec, batch: int) -> None:
    """What a large batch launches, on a small one: results do not depend on the launch beyond the outputs' rounding."""
    for checkpoint in (torch.float32, torch.bfloat16):
        case = make_case(spec, 4, True, torch.bfloat16, checkpoint)
        check(spec, case, configuration(spec, batch, checkpoint.itemsize))


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_a_lowered_limit_finds_more_rows_than_it_allows(spec: LayerSpec) -> None:
    for checkpoint in (torch.float32, torch.bfloat16):
        case = make_case(spec, 4, True, torch.bfloat16, checkpoint, held=2 * BUFFER_LEN)
        check(spec, case, max_committed=2 * BUFFER_LEN)


def configuration(spec: LayerSpec, batch: int, state_bytes: int) -> object:
    from replayssm.ops.delta import window_launch as delta
    from replayssm.ops.device import device_arch
    from replayssm.ops.mamba2 import window_launch as mamba2

    rest = (state_bytes, 4, 16, device_arch(torch.device("cuda")))
    if isinstance(spec, Mamba2Spec):
        dims = (spec.num_heads, spec.n_groups, spec.head_dim, spec.d_state)
        # Such tiles a program as the layers of real models have, where this small one divides.
        return mamba2.window_config(batch * 128 // spec.num_heads, mamba2.WindowShape(*dims, *rest))
    heads, dims = (spec.num_k_heads, spec.num_v_heads), (spec.head_k_dim, spec.head_v_dim)
    shape = delta.WindowShape(*heads, *dims, isinstance(spec, KDASpec), *rest)
    return delta.window_config(batch * 64 // spec.num_v_heads, shape)


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_a_flush_equals_materializing(spec: LayerSpec) -> None:
    """Checkpoints after a flush are those of the materialize kernel: to the last bit where the sums are the same."""
    from replayssm.ops.delta.launch import delta_materialize
    from replayssm.ops.mamba2.launch import mamba2_materialize

    case = make_case(spec, 5, False, torch.bfloat16, torch.float32)
    got = check(spec, case)[1]
    state, slots = case.state.cuda(), torch.tensor(case.flushed, dtype=torch.int32, device="cuda")
    ring = {n: t.cuda() for n, t in case.ring.items() if n != "u"}
    rows = (case.rows[0].cuda(), slots, None, state, slots)
    if spec.family == "mamba2":
        mamba2_materialize(case.inputs["A"].cuda(), state, *ring.values(), *rows, pad_slot_id=-1)
        assert torch.equal(state.cpu()[case.flushed], got[case.flushed])
    else:
        delta_materialize(state, *ring.values(), *rows, pad_slot_id=-1, use_qk_l2norm=True)
        assert error(got[case.flushed], state.cpu()[case.flushed]) < 1e-6


@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_identical_launches_are_bit_equal(spec: LayerSpec) -> None:
    case = make_case(spec, 6, True, torch.bfloat16, torch.float32)
    runs = [check(spec, case) for _ in range(3)]
    assert all(
        torch.equal(a.nan_to_num(9.0), b.nan_to_num(9.0)) for r in runs[1:] for a, b in zip(runs[0], r, strict=True)
    )
