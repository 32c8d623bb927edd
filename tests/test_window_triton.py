"""The portable window kernels in Triton's interpreter: against the plain recurrence in float64, at tiny shapes."""

from __future__ import annotations

import os
import random
import subprocess
import sys

import pytest
import torch
from families import (
    CASES,
    ORDER,
    RINGS,
    Case,
    cast,
    new_output,
    op_options,
    random_params,
    random_tokens,
    relative_error,
)

from replayssm.cursors import NO_LIMIT, must_flush
from replayssm.ops.delta import reference as delta_reference
from replayssm.ops.mamba2 import reference as mamba2_reference

pytest.importorskip("triton")

BUFFER_LEN, MAX_WINDOW, NUM_SLOTS = 8, 5, 6
RING_LEN = BUFFER_LEN + MAX_WINDOW
# Committed rows, window and limit of each row: flushes and none, zero tokens with and without a flush, a full window.
ROWS = ((3, 4, NO_LIMIT), (6, 3, NO_LIMIT), (0, 5, NO_LIMIT), (4, 0, NO_LIMIT), (5, 0, 4))
STEPS = {"mamba2": mamba2_reference.mamba2_step, "delta": delta_reference.delta_step}


def random_tree(length: int, pick: random.Random) -> list[int]:
    return [pick.randint(-1, i - 1) for i in range(length)]


def filled_ring(case: Case, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Rings of plausible rows in float64."""
    ring = {}
    for name, field in case.spec.ring_fields.items():
        shape = (NUM_SLOTS, field.heads, RING_LEN, *(() if field.dim is None else (field.dim,)))
        values = torch.randn(shape, generator=generator, dtype=torch.float64).bfloat16().double()
        ring[name] = (
            {"dt": values.abs(), "g": -values.abs(), "beta": values.sigmoid()}.get(name, values).float().double()
        )
    return ring


def fill_u(case: Case, slot: int, cursors: torch.Tensor, state: torch.Tensor, ring: dict[str, torch.Tensor]) -> None:
    """The u of a slot's committed rows, by the recurrence: the reference replays k and v, kernels read u."""
    S, (start, committed, _, _) = state[slot], cursors[slot].tolist()
    for j in range(committed):
        at = (start + j) % RING_LEN
        row = (ring[n][slot, :, at] for n in ("k", "v", "g", "beta"))
        S, ring["u"][slot, :, at] = delta_reference._update(S, *row, True)


def window_inputs(case: Case, tree: bool, poison: float) -> tuple[dict, dict, torch.Tensor, dict]:
    """Inputs, rings, states (float64 and as the kernel gets them, poisoned) and the rows of one step."""
    generator, pick = torch.Generator().manual_seed(3), random.Random(4)
    slots = [4, 0, 3, 1, 5]
    cursors = torch.full((NUM_SLOTS, 4), -7, dtype=torch.int32)
    ring = filled_ring(case, generator)
    state = torch.randn(NUM_SLOTS, *case.spec.state_shape, generator=generator).double()
    state[2] = poison
    for values in ring.values():
        values[2] = poison
    for slot, (committed, _, limit) in zip(slots, ROWS, strict=True):
        start = pick.randrange(RING_LEN)
        cursors[slot] = torch.tensor([start, committed, limit, 0])
        for values in ring.values():
            values[slot, :, [(start + j) % RING_LEN for j in range(committed, RING_LEN)]] = poison
        if case.prefix == "delta":
            fill_u(case, slot, cursors, state, ring)
    slots.insert(2, -1)
    lens = [n for _, n, _ in ROWS]
    lens.insert(2, 2)
    parents = [p for n in lens for p in random_tree(n, pick)]
    rows = {
        "slot_indices": torch.tensor(slots, dtype=torch.int32),
        "query_start_loc": torch.tensor([0, *lens]).cumsum(0).int(),
        "cursors": cursors,
        "parents": torch.tensor(parents, dtype=torch.int32) if tree else None,
    }
    return random_tokens(case, sum(lens), generator) | random_params(case, generator), ring, state, rows


def run(
    step: object, case: Case, inputs: dict, state: torch.Tensor, ring: dict, rows: dict, **more: object
) -> torch.Tensor:
    out = new_output(case, int(rows["query_start_loc"][-1]), inputs[ORDER[case.prefix][0]].dtype)
    limits = {"buffer_len": BUFFER_LEN, "pad_slot_id": -1, "max_window_len": MAX_WINDOW, "parents": rows["parents"]}
    step(
        *(inputs[n] for n in ORDER[case.prefix]),
        *(
            state,
            *(ring[n] for n in RINGS[case.prefix]),
            rows["cursors"],
            rows["slot_indices"],
            rows["query_start_loc"],
            out,
        ),
        **limits,
        **op_options(case),
        **more,
    )
    return out


def check(
    case_name: str, dtype: torch.dtype, tree: bool, poison: float, device: str = "cpu", config: object = None
) -> None:
    """One step of the window kernel against the reference in float64: outputs, states and rings."""
    from replayssm.ops.delta.window_launch import delta_window
    from replayssm.ops.mamba2.window_launch import mamba2_window

    case = next(c for c in CASES if c.name == case_name)
    inputs, ring, state, rows = window_inputs(case, tree, poison)
    # The interpreter truncates float32 to bfloat16: its bf16 results may be off by a whole unit, not half of one.
    eps = 2 * torch.finfo(dtype).eps
    mine = {n: None if v is None else v.to(device) for n, v in cast(inputs, dtype).items()}
    kinds = {n: torch.float32 if n in ("dt", "g", "beta") else dtype for n in ring}
    my_ring = {n: v.to(kinds[n]).to(device) for n, v in ring.items()}
    my_state = state.float().to(device)
    my_rows = {n: None if v is None else v.to(device) for n, v in rows.items()}
    window = mamba2_window if case.prefix == "mamba2" else delta_window
    got = run(window, case, mine, my_state, my_ring, my_rows, config=config).cpu()
    expected = run(STEPS[case.prefix], case, cast(inputs, torch.float64, torch.float64), state, ring, rows)
    assert relative_error(got, expected) < 4 * eps + 1e-6
    pads = slice(*rows["query_start_loc"][2:4].tolist())
    assert (got[pads] == 0).all() and torch.isfinite(got).all()
    flushed = torch.zeros(NUM_SLOTS, dtype=torch.bool)
    for slot, (committed, length, limit) in zip([4, 0, 3, 1, 5], ROWS, strict=True):
        flushed[slot] = must_flush(committed, length, BUFFER_LEN, limit)
    assert flushed.sum() == 2
    assert relative_error(my_state.cpu()[flushed], state[flushed]) < 2e-6
    kept = ~flushed
    assert torch.equal(my_state.cpu()[kept].nan_to_num(7), state[kept].float().nan_to_num(7))
    for name, values in ring.items():
        mine_now, same = my_ring[name].cpu().double(), values.isfinite() & (values.abs() < 1e20)
        assert torch.equal(mine_now.isfinite() & (mine_now.abs() < 1e20), same), name
        assert relative_error(mine_now[same], values[same]) < 4 * torch.finfo(kinds[name]).eps + 1e-6, name


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_window_equals_the_recurrence_in_the_interpreter(case: Case, tree: bool) -> None:
    dtype, poison = ("float16", "1e30") if tree and case.name in ("gdn", "mamba2") else ("float32", "nan")
    code = (
        f"import torch, test_window_triton as t\nt.check({case.name!r}, torch.{dtype}, {tree}, float({poison!r}))\n"
        f"if {not tree}: t.check({case.name!r}, torch.bfloat16, {tree}, float('1e30'))"
    )
    here = os.path.dirname(__file__)
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([here, os.path.dirname(here)])}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
