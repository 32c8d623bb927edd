"""Windows with a read copy on a GPU against float64 from the dequantised bytes: outputs, states, copies, rings."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from read_case import checkpoint, copied, read_copy, same_bytes, with_copy
from test_window_gpu import BUFFER_LEN, NUM_SLOTS, OWNED, Case, error, make_case, name
from test_window_lifecycle_gpu import FAMILIES, Lifecycle, Requests, table_kernels

from replayssm import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
from replayssm.cursors import NUM_COMMITTED, RING_START
from replayssm.ops.delta import torch_ops as delta_torch
from replayssm.ops.mamba2 import torch_ops as mamba2_torch
from replayssm.quant import dequantize, quantize
from replayssm.workload import op_options, positional

pytestmark = pytest.mark.gpu
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


class ReadLifecycle(Lifecycle):
    """Windows that read a copy."""

    def _window(self, step: Any, first: int, count: int) -> None:
        layer, out = self.requests.layer, self._out(count)
        inputs = {n: v[first : first + count] for n, v in self.inputs.items()}
        rows = (self.requests.cache.cursors, step.slot_indices, step.query_start_loc, out)
        options = {"buffer_len": step.buffer_len, "pad_slot_id": -1, "max_window_len": step.max_window_len}
        arguments = positional(self.spec, inputs | self.requests.parameters)
        options |= layer.op_formats() | op_options(self.spec)
        self.window(*arguments, layer.state, *layer.ring.values(), *rows, **options)
        self.finite &= torch.isfinite(out).all()


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
        buffer_len=BUFFER_LEN,
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
    activation: torch.dtype = BF16, device: str = "cuda", step: Any = None, **more: Any,
) -> None:  # fmt: skip
    """One step: outputs, checkpoints and copies of flushed slots and of others, ring rows appended and left alone."""
    case = make_case(spec, window, tree, activation, CHECKPOINTS[checkpoint_format])
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


@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize(("window", "read"), product((4, 6), READS))
@pytest.mark.parametrize("spec", SPECS, ids=name)
def test_windows(spec: LayerSpec, window: int, read: str, tree: bool) -> None:
    check(spec, window, read, tree=tree, replay=replay_of(spec))


@pytest.mark.parametrize(("read", "stored"), [*product(("nvfp4", "int8"), ("fp16", "bf16", "fp8")), ("none", "fp8")])
@pytest.mark.parametrize("spec", [SUPER, NANO, QWEN, KIMI], ids=name)
def test_checkpoints(spec: LayerSpec, read: str, stored: str) -> None:
    for replay in ("serial", "chunk"):
        check(spec, 4, read, stored, replay=replay)


@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("spec", [SUPER, NANO, QWEN, KIMI], ids=name)
def test_fp16_inputs_and_one_token(spec: LayerSpec, read: str) -> None:
    check(spec, 4, read, activation=FP16, replay=replay_of(spec))
    check(spec, 1, read, replay=replay_of(spec))


def delta_configs() -> list[Any]:
    """Configurations of GDN's table."""
    from replayssm.ops.delta.read_window_configs import STEP

    return [config for _, config in STEP[False]]


def all_configs() -> list[Any]:
    """Configurations of the tables, and the portable kernel's."""
    from replayssm.ops.delta import read_window_configs as delta
    from replayssm.ops.mamba2 import read_window_launch as mamba2

    cases = [(KIMI if kda else QWEN, config) for kda, table in delta.STEP.items() for _, config in table]
    cases += [(spec, delta.PORTABLE) for spec in (QWEN, KIMI)]
    cases += [(SUPER, config) for _, configs in mamba2.STEP for config in configs]
    return [*cases, *((NANO, configs[-1]) for _, configs in mamba2.STEP)]


@pytest.mark.parametrize(("spec", "config"), all_configs(), ids=str)
def test_every_configuration(spec: LayerSpec, config: Any) -> None:
    check(spec, 4, "nvfp4", replay=replay_of(spec), window_config=config)


@pytest.mark.parametrize("read", ["nvfp4", "int8"])
@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_many_windows_remember_as_decoding_does(spec: LayerSpec, read: str) -> None:
    """Random acceptance, windows of zero tokens, padding, recycled slots: states and copies after 400 windows."""
    owned, windows = [5, 0, 3, 7, 2], 400
    life = ReadLifecycle(Requests(spec, 9, owned, read=read), table_kernels(spec))
    for i in range(windows):
        life.step()
        if i % 150 == 99:
            life.recycle(owned[3])
    life.flush()
    layer, cursors = life.requests.layer, life.requests.cache.cursors
    assert bool(life.finite) and int(cursors[owned, 1].max()) == 0 and int(cursors[owned[0], 3]) > windows // 25
    states, plain, exact = layer.state[owned], life.decoded(), life.decoded_exactly()
    if isinstance(spec, Mamba2Spec):
        assert torch.equal(states, plain)
    assert error(states, exact) <= 2 * error(plain, exact)
    copies = layer.read_copy.gather(torch.tensor(owned, device="cuda")).tensors()
    for part, tensor in quantize(states, read).tensors().items():
        assert same_bytes(copies[part], tensor), part


@pytest.mark.parametrize("config", [None, *delta_configs()], ids=str)
def test_scales_that_tie(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both of a block's scales err alike in fp32, the format's integer sums decide; here in every head."""
    case, generator = make_case(QWEN, 4, False, BF16, FP32), torch.Generator().manual_seed(1)
    values = torch.randint(-24, 25, case.state.shape, generator=generator) / 4
    values[..., ::16] = 6
    case.state = torch.where(case.state.isnan(), case.state, values)
    # Rows that change nothing.
    for field in ("u", "g", "beta"):
        case.ring[field] = torch.where(case.ring[field].isnan(), case.ring[field], 0)
    monkeypatch.setattr(sys.modules[__name__], "make_case", lambda *args: case)
    check(QWEN, 4, "nvfp4", replay="chunk", window_config=config)


@pytest.mark.parametrize("entry", [0, -1])
@pytest.mark.parametrize("crew", [1, 3, 7])
@pytest.mark.parametrize("read", ["nvfp4", "int8"])
@pytest.mark.parametrize("spec", [QWEN, KIMI], ids=name)
def test_shares_that_cross_rows_and_k_heads(spec: LayerSpec, read: str, crew: int, entry: int) -> None:
    """Flushing programs whose equal shares begin and end anywhere."""
    from replayssm.ops.delta.read_window_configs import STEP

    config = STEP[isinstance(spec, KDASpec)][entry][1]
    check(spec, 4, read, replay="chunk", window_config=replace(config, crew=crew))


def few_programs(spec: LayerSpec, **more: Any) -> Any:
    """The configuration of large batches with fewer flushing programs than heads that flush."""
    from replayssm.ops.mamba2.read_window_launch import STEP

    configs = STEP[-1][1]
    return replace(configs[-1 if spec.state_shape[1] % 64 else 0], crew=3, **more)


@pytest.mark.parametrize("heads", [1, 2])
@pytest.mark.parametrize(("read", "stored"), [("nvfp4", "fp32"), ("nvfp4", "fp16"), ("fp8", "fp32"), ("int8", "bf16")])
@pytest.mark.parametrize("spec", [SUPER, NANO], ids=name)
def test_programs_that_flush_many_heads(spec: LayerSpec, read: str, stored: str, heads: int) -> None:
    """Each goes from head to head and from row to row, the next checkpoint on its way."""
    more = {} if read == "nvfp4" else {"heads": 2, "tile": 64}
    config = few_programs(spec, flush_heads=heads, **more)
    check(spec, 4, read, stored, replay="serial" if stored == "fp32" else "chunk", window_config=config)


@pytest.mark.parametrize("crew", [3, 528])
@pytest.mark.parametrize("spec", [SUPER, NANO], ids=name)
def test_heads_whose_scales_tie(spec: LayerSpec, crew: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As `test_scales_that_tie`, where the next checkpoint has taken the head's place (few programs) and where not."""
    case, generator = make_case(spec, 4, False, BF16, FP32), torch.Generator().manual_seed(1)
    values = torch.randint(-24, 25, case.state.shape, generator=generator) / 4
    values[..., ::16] = 6
    case.state = torch.where(case.state.isnan(), case.state, values)
    # Rows that change nothing.
    case.ring["dt"] = torch.where(case.ring["dt"].isnan(), case.ring["dt"], 0)
    monkeypatch.setattr(sys.modules[__name__], "make_case", lambda *args: case)
    check(spec, 4, "nvfp4", window_config=replace(few_programs(spec), crew=crew))


@pytest.mark.parametrize("spec", FAMILIES, ids=name)
def test_a_lowered_buffer_flushes_more_rows_than_kernels_lay_out(spec: LayerSpec) -> None:
    owned, lens = [5, 0, 3], [4, 4, 4]
    requests = Requests(spec, 9, owned, read="nvfp4", buffer_len=32)
    for _ in range(6):
        step = requests.cache.begin_step(owned, lens)
        requests.decode(step, requests.inputs(sum(lens)))
        requests.cache.commit(step, lens)
    want = requests.cache.materialize(0, owned)
    step = requests.cache.begin_step(owned, lens, buffer_len=4)
    assert bool(torch.isfinite(requests.decode(step, requests.inputs(sum(lens)))).all())
    states = requests.layer.state[owned]
    assert error(states, want) < 2e-6
    copies = requests.layer.read_copy.gather(torch.tensor(owned, device="cuda")).tensors()
    for part, tensor in quantize(states, "nvfp4").tensors().items():
        assert same_bytes(copies[part], tensor), part


@pytest.mark.parametrize("spec", [SUPER, NANO, QWEN, KIMI], ids=name)
def test_a_graph_follows_slots_and_cursors(spec: LayerSpec) -> None:
    """A captured step gives, for rows in another order and other cursors, what it gives without a graph."""
    case = make_case(spec, 4, False, BF16, FP32)
    case.rows = tuple(t.cuda() for t in case.rows)
    case.inputs = {n: t.cuda() for n, t in case.inputs.items()}
    start = new_layer(case, "nvfp4", False, "cuda")
    options = {"window": 4, "replay": replay_of(spec)}
    graphed = copied(start)
    run(read_step(spec), spec, case, copied(start), False, **options)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run(read_step(spec), spec, case, graphed, False, **options)
    for turn in range(3):
        case.rows[1].copy_(case.rows[1].roll(turn))
        case.rows[0][:, NUM_COMMITTED] = (case.rows[0][:, NUM_COMMITTED] * 7 // 8).clamp(max=16)
        for name_, tensor in start.items():
            graphed[name_].copy_(tensor)
        out.fill_(float("nan"))
        graph.replay()
        eager = copied(start)
        assert torch.equal(run(read_step(spec), spec, case, eager, False, **options), out)
        for name_ in start:
            assert same_bytes(graphed[name_], eager[name_]), name_
