"""`replayssm check` finds what it is there to find, and `bench` refuses politely."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch

from replayssm import GDNSpec, KDASpec, Mamba2Spec, preset
from replayssm.bench.decode import LayerBench, phase_bytes
from replayssm.check import run_check
from replayssm.check_cases import DTYPES, FORMATS, CheckCase, check_cases, shrink
from replayssm.cli.app import main
from replayssm.formats import CHECKPOINT_FORMATS, READ_FORMATS
from replayssm.ops import stored
from replayssm.ops.delta import torch_ops as delta_ops
from replayssm.ops.mamba2 import torch_ops as mamba2_ops
from replayssm.plan import Plan
from replayssm.quant import QuantizedState
from replayssm.traffic import layer_traffic

CPU = torch.device("cpu")
SMALL = (Mamba2Spec(4, 8, 16, 2), GDNSpec(1, 2, 16, 8), KDASpec(2, 2, 16, 8, lower_bound=-5.0))


PLAIN = [formats for formats in FORMATS if formats[1:] in {(c, "none", "nearest") for c in DTYPES}]
CASES = [*check_cases(SMALL, formats=PLAIN), *check_cases(SMALL, ["verify"], formats=sorted(set(FORMATS) - set(PLAIN)))]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_small_case_passes(case: CheckCase) -> None:
    result = run_check(case, CPU)
    assert result.passed, result
    if case.checkpoint == "fp32":
        assert result.bit_equal


@pytest.mark.parametrize(
    ("module", "name", "fault"),
    [
        (mamba2_ops, "_timestep", lambda f: lambda *a: f(*a) * 1.001),
        (delta_ops, "l2norm", lambda f: lambda x: f(x) * 1.001),
        (mamba2_ops, "_update_", lambda f: lambda S, x, dt, A, B: f(S, x, dt, A, B.bfloat16().float() * 1.001)),
        (delta_ops, "_update_", lambda f: lambda S, k, v, g, beta: f(S, k, v, g, beta * 1.001)),
    ],
)
def test_a_fault_in_the_kernels_is_found(
    module: object, name: str, fault: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wrong constant in what the float32 ops compute, while float64 stays right."""
    right = getattr(module, name)
    wrong = fault(right)

    def only_float32(first: torch.Tensor, *rest: object) -> object:
        exact = torch.float64 in (first.dtype, *rest[-1:])
        return (right if exact else wrong)(first, *rest)

    monkeypatch.setattr(module, name, only_float32)
    spec = SMALL[0] if module is mamba2_ops else SMALL[1]
    assert not run_check(CheckCase(spec, "fp32", "fp32", "decode"), CPU).passed


def test_a_wrong_read_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """One code of one slot that is off by one step."""

    def quantize_into(state: torch.Tensor, q: QuantizedState, slots: torch.Tensor, **options: object) -> None:
        right(state, q, slots, **options)
        q.codes[slots[0], 0, 0, 0] ^= 1

    right = stored.quantize_into
    monkeypatch.setattr(stored, "quantize_into", quantize_into)
    result = run_check(CheckCase(SMALL[1], "bf16", "fp32", "decode", read="nvfp4"), CPU)
    assert not result.copies_exact and not result.passed and result.bit_equal


def test_reading_something_else_than_the_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored.StoredState, "for_reads", stored.StoredState.checkpoint)
    result = run_check(CheckCase(SMALL[0], "bf16", "fp32", "verify", read="nvfp4"), CPU)
    assert result.copies_exact and result.bit_equal and not result.passed


def test_only_formats_that_the_device_runs_are_checked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(CheckCase, "runs_on", lambda case, device: case.read != "nvfp4")
    monkeypatch.setattr("replayssm.check_cases.SHAPES", SMALL[:1])
    monkeypatch.setattr("replayssm.check.FLUSHES", 1)
    assert main(["check", "--device", "cpu", "--read", "none", "--read", "nvfp4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["not_here"] == 8 and {row["read"] for row in report["results"]} == {"none"}
    assert main(["check", "--device", "cpu", "--read", "int3"]) == 2
    assert "read is int3; allowed: none, bf16, int8, fp8, nvfp4" in capsys.readouterr().err.replace("'", "")


def test_shrink_keeps_what_kernels_see() -> None:
    assert shrink(preset("nemotron-3-super-120b-a12b")[0]).state_shape == (32, 64, 128)
    gdn = shrink(preset("qwen3.5-122b-a10b")[0])
    assert (gdn.num_k_heads, gdn.num_v_heads) == (2, 8)
    assert shrink(KDASpec(32, 32, 128, 128)).state_shape == (2, 128, 128)


def test_command_reports_and_exits(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("replayssm.check.FLUSHES", 1)
    assert main(["check", "kimi-linear-48b", "--device", "cpu", "--batch", "1", "--read", "nvfp4", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] and {row["mode"] for row in report["results"]} == {"decode", "verify"}


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("arguments", [["bench"], ["check", "--device", "cuda"]])
def test_without_a_gpu_one_clear_line(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "none was found here" in error or "no CUDA device was found here" in error
    assert error.count("\n") == 1


def test_phase_bytes_by_hand() -> None:
    spec = GDNSpec(16, 32, 128, 128)
    traffic = layer_traffic(spec, CHECKPOINT_FORMATS["fp32"], READ_FORMATS["none"], torch.bfloat16)
    state, fixed = 32 * 128 * 128 * 4, traffic.row_append + traffic.token_io + 20
    row = 16 * 128 * 2 + 32 * 128 * 2
    assert phase_bytes(traffic, "flush", 3, 16) == 256 + 3 * (2 * state + 16 * (row + 2 * 32 * 4) + fixed)
    assert phase_bytes(traffic, "middle", 3, 16) == 256 + 3 * (state + 8 * (row + 32 * 4) + fixed)
    assert phase_bytes(traffic, "stepwise", 3, 16) == 256 + 3 * (2 * state + traffic.token_io + 4)


def test_bench_schedules_flush_one_row_in_sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("replayssm.bench.decode.POOL_BYTES", 1)
    bench = LayerBench(Plan((SMALL[1],)), batch=32)
    spread, lockstep = (torch.stack(bench.schedule(phase))[:, :, 1] for phase in ("cycle", "cycle_lockstep"))
    assert ((spread == 16).sum(1) == 2).all() and (spread.float().mean(1) == 8.5).all()
    assert ((lockstep == 16).sum(1) == torch.tensor([0] * 15 + [32])).all()
    for launch in bench.launches("cycle"):
        launch()
    assert torch.isfinite(bench.out).all()
