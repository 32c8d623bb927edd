"""A window step with a read copy against float64 from the dequantised bytes: outputs, states, copies, rings."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from read_case import checkpoint, copied, read_copy, same_bytes, with_copy
from test_window_gpu import BUFFER_LEN, NUM_SLOTS, OWNED, Case, error, make_case

from replayssm import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
from replayssm.cursors import NUM_COMMITTED, RING_START
from replayssm.ops.delta import torch_ops as delta_torch
from replayssm.ops.mamba2 import torch_ops as mamba2_torch
from replayssm.quant import dequantize, quantize
from replayssm.workload import op_options, positional

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
READS = ("bf16", "int8", "fp8", "nvfp4")
CHECKPOINTS = {"fp32": FP32, "fp16": FP16, "bf16": BF16, "fp8": FP32}
QWEN = GDNSpec(num_k_heads=2, num_v_heads=8, head_k_dim=128, head_v_dim=128)
KIMI = KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=128, head_v_dim=128)
SUPER = Mamba2Spec(num_heads=16, head_dim=64, d_state=128, n_groups=2)
NANO = Mamba2Spec(num_heads=12, head_dim=80, d_state=128, n_groups=1)
SPECS = (
    SUPER,
    NANO,
    Mamba2Spec(num_heads=12, head_dim=128, d_state=64, n_groups=1),
    QWEN,
    replace(QWEN, num_v_heads=6),
    replace(QWEN, use_qk_l2norm=False),
    KIMI,
    replace(KIMI, lower_bound=-5.0),
)
# An output is rounded once to its dtype, and reads u and weights rounded likewise or to tf32.
OUT = {BF16: 5e-3, FP16: 1e-3, FP32: 5e-6}


def read_step(spec: LayerSpec) -> Any:
    if isinstance(spec, Mamba2Spec):
        from replayssm.ops.mamba2.read_launch import mamba2_read_step

        return mamba2_read_step
    from replayssm.ops.delta.read_launch import delta_read_step

    return delta_read_step


def replay_of(spec: LayerSpec) -> str:
    """The form of a flush that is the default with an fp32 checkpoint."""
    return "serial" if isinstance(spec, Mamba2Spec) else "chunk"


def torch_step(spec: LayerSpec) -> Any:
    return mamba2_torch.mamba2_step if isinstance(spec, Mamba2Spec) else delta_torch.delta_step


def new_layer(case: Case, read: str, fp8: bool, device: str) -> dict[str, torch.Tensor]:
    """The case's pool with a read copy, slots apart from each other."""
    state = {"state": case.state.to(device)}
    rings = {f"ring_{n}": t.to(device, copy=True) for n, t in case.ring.items()}
    return with_copy(state, SimpleNamespace(page=96), read, OWNED, fp8) | rings


def run(
    step: Any, spec: LayerSpec, case: Case, layer: dict[str, torch.Tensor], exact: bool, window: int = 0, **more: Any
) -> Any:
    """Outputs of a step of `layer`, in place; exact: in float64, from plain states."""

    def place(t: torch.Tensor | None) -> Any:
        device = layer["state"].device
        return None if t is None else (t.double() if exact and t.is_floating_point() else t).to(device)

    inputs, (cursors, slots, loc) = {n: place(t) for n, t in case.inputs.items()}, map(place, case.rows)
    first = next(iter(inputs.values()))
    out = torch.full((len(first), *spec.state_shape[:2]), float("nan"), dtype=first.dtype, device=first.device)
    rings = (place(layer[f"ring_{n}"]) if exact else layer[f"ring_{n}"] for n in spec.ring_fields)
    formats = {} if exact else {"read_codes": layer.get("read_codes"), "read_scales": layer.get("read_scales")}
    if not exact:
        formats |= {"read_global": layer.get("read_global_scale"), "state_scales": layer.get("state_scales")}
    step(
        *(*positional(spec, inputs), layer["state"], *rings, cursors, slots, loc, out),
        buffer_len=case.buffer_len,
        pad_slot_id=-1,
        max_window_len=window or int(case.rows[2].diff().max()),
        parents=place(case.parents),
        **op_options(spec),
        **formats,
        **more,
    )
    return out


def replayed(spec: LayerSpec, case: Case, before: dict[str, torch.Tensor]) -> torch.Tensor:
    """float64 states after the committed rows, of every owned slot."""
    cursors, dst = case.rows[0].to(before["state"].device), checkpoint(before).double()
    slots = torch.tensor(OWNED, dtype=torch.int32, device=dst.device)
    if isinstance(spec, Mamba2Spec):
        kept = (case.inputs["A"].to(dst.device).double(), dst.clone(), *(before[f"ring_{n}"] for n in ("x", "B", "dt")))
        mamba2_torch.mamba2_materialize(*kept, cursors, slots, None, dst, slots, pad_slot_id=-1)
    else:
        kept = (dst.clone(), *(before[f"ring_{n}"] for n in ("k", "v", "g", "beta")))
        norm = {"use_qk_l2norm": spec.use_qk_l2norm}
        delta_torch.delta_materialize(*kept, cursors, slots, None, dst, slots, pad_slot_id=-1, **norm)
    return dst


def check(
    spec: LayerSpec, window: int, read: str, checkpoint_format: str = "fp32", tree: bool = False,
    activation: torch.dtype = BF16, device: str = "cuda", step: Any = None, buffer_len: int = BUFFER_LEN, **more: Any,
) -> None:  # fmt: skip
    """One step: outputs, checkpoints and copies of flushed slots and of others, ring rows appended and left alone."""
    case = make_case(spec, window, tree, activation, CHECKPOINTS[checkpoint_format], buffer_len=buffer_len)
    layer = new_layer(case, read, checkpoint_format == "fp8", device)
    before = copied(layer)
    got = run(step or read_step(spec), spec, case, layer, False, **more)

    wanted = replayed(spec, case, before)
    unit = {"fp32": 2e-6, "fp16": 2**-11, "bf16": 2**-8, "fp8": 2**-4}[checkpoint_format]
    flushed = [slot for slot in OWNED if slot in case.flushed]
    for slot in flushed:
        assert error(checkpoint(layer)[slot], wanted[slot]) < unit, slot
        if read != "none":
            fresh = quantize(checkpoint(layer)[slot][None], read)
            for part, tensor in read_copy(layer, read).tensors().items():
                assert same_bytes(tensor[slot], fresh.tensors()[part][0]), (part, slot)
    others = [slot for slot in range(NUM_SLOTS) if slot not in flushed]
    for part in [n for n in layer if n.startswith(("state", "read_"))]:
        assert same_bytes(layer[part][others], before[part][others]), part

    values = dequantize(read_copy(before, read)).double()
    values[flushed] = dequantize(read_copy(layer, read)).double()[flushed]
    cursors, ring_len = case.rows[0].clone(), before[f"ring_{next(iter(spec.ring_fields))}"].shape[2]
    ends = (cursors[:, RING_START] + cursors[:, NUM_COMMITTED]) % ring_len
    cursors[flushed, RING_START], cursors[flushed, NUM_COMMITTED] = ends[flushed].to(torch.int32), 0
    plain = {n: t for n, t in copied(before).items() if n.startswith("ring_")} | {"state": values}
    plain = {n: t.double() if n not in ("ring_k", "ring_v", "ring_x", "ring_B") else t for n, t in plain.items()}
    exact_case = replace(case, rows=(cursors, *case.rows[1:]))
    want = run(_keeping_rings(torch_step(spec), plain, spec), spec, exact_case, plain, True)
    slots, loc = case.rows[1], case.rows[2]
    for i, slot in enumerate(slots.tolist()):
        mine = slice(int(loc[i]), int(loc[i + 1]))
        if not 0 <= slot < NUM_SLOTS:
            assert (got[mine] == 0).all()
    assert error(got, want) < OUT[activation]
    for n in spec.ring_fields:
        check_ring(layer[f"ring_{n}"], before[f"ring_{n}"], plain[f"ring_{n}"], n, OUT[activation])


def _keeping_rings(step: Any, plain: dict[str, torch.Tensor], spec: LayerSpec) -> Any:
    """The step; what it appends to its float64 rings is kept in `plain`."""

    def run_and_keep(*args: Any, **kwargs: Any) -> None:
        step(*args, **kwargs)
        at = len(args) - 4 - len(spec.ring_fields)
        for i, n in enumerate(spec.ring_fields):
            plain[f"ring_{n}"] = args[at + i]

    return run_and_keep


def check_ring(got: torch.Tensor, before: torch.Tensor, want: torch.Tensor, field: str, tolerance: float) -> None:
    """Rows that the exact step appended are appended, and no others are touched."""
    new = ~((want == before.double()) | (want.isnan() & before.isnan()))
    rows = new.flatten(3).any(-1).any(1, keepdim=True) if new.dim() == 4 else new.any(1, keepdim=True)
    rows = rows.expand(got.shape[:3])
    assert same_bytes(got[~rows], before[~rows]), field
    if field in ("k", "v", "x", "B"):
        assert torch.equal(got[rows].double(), want[rows]), field
    else:
        assert error(got[rows], want[rows]) < (tolerance if field == "u" else 2e-6), field
