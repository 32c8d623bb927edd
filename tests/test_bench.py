"""What the benchmarks run and count, on a CPU: positions of the rows, bytes of a phase, results put beside ceilings."""

from __future__ import annotations

import pytest
import torch

from replayssm import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, Plan
from replayssm.bench import decode
from replayssm.bench.measure import against, by_batch
from replayssm.bench.timing import Ceilings
from replayssm.bench.windows import WINDOW_PHASES, WindowBench
from replayssm.cli import bench as cli_bench
from replayssm.cursors import flush_mask

SPECS = (
    Mamba2Spec(num_heads=2, head_dim=4, d_state=8, n_groups=1),
    GDNSpec(num_k_heads=1, num_v_heads=2, head_k_dim=8, head_v_dim=4),
    KDASpec(num_k_heads=1, num_v_heads=1, head_k_dim=8, head_v_dim=4),
)


@pytest.fixture(autouse=True)
def _small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decode, "POOL_BYTES", 1)


def bench(spec: LayerSpec, batch: int = 20, tokens: int = 4) -> WindowBench:
    return WindowBench(Plan((spec,), num_draft_tokens=tokens - 1), batch)


@pytest.mark.parametrize("tokens", [2, 4, 16])
def test_a_fifth_of_the_mixed_rows_flushes_and_positions_differ(tokens: int) -> None:
    windows = bench(SPECS[0], tokens=tokens)
    for phase, length in (("token_mixed", 1), ("window_mixed", tokens)):
        for committed in windows.committed(phase):
            lens = torch.full((20,), length, dtype=torch.int32)
            assert int(flush_mask(windows.cursors(committed), lens, 16).sum()) == 4
            assert int(committed.min()) >= 0 and int(committed.max()) <= 16
    assert len({tuple(committed.tolist()) for committed in windows.committed("window_mixed")}) > 1


@pytest.mark.parametrize("tokens", [2, 4, 16])
def test_no_row_flushes_half_way(tokens: int) -> None:
    windows = bench(SPECS[0], tokens=tokens)
    for phase, length in (("token_half", 1), ("window_half", tokens)):
        (committed,) = windows.committed(phase)
        assert not bool(flush_mask(windows.cursors(committed), torch.full((20,), length).int(), 16).any())


@pytest.mark.parametrize("spec", SPECS, ids=lambda s: s.family)
def test_launches_of_every_phase_run_and_write_all_outputs(spec: LayerSpec) -> None:
    windows = bench(spec, batch=5)
    for phase in WINDOW_PHASES:
        out = windows.window_out if phase.startswith("window") else windows.out
        launches = windows.launches(phase)
        assert len(launches) == max(len(windows.layers), len(windows.committed(phase)))
        for launch in launches:
            out.fill_(torch.nan)
            launch()
            assert torch.isfinite(out).all()


def test_bytes_of_a_phase_are_those_of_its_rows() -> None:
    windows, t = bench(SPECS[1], batch=10), bench(SPECS[1]).traffic
    fixed = t.params + 10 * (4 * (t.row_append + t.token_io) + 20)
    assert windows.nbytes("window_half") == fixed + 10 * (t.state + 8 * t.row_read)
    windows._committed["window_mixed"] = [torch.tensor([3] * 8 + [14] * 2)]
    rows = 8 * (t.state + 3 * t.row_read) + 2 * (2 * t.state + 14 * t.row_replay)
    assert windows.nbytes("window_mixed") == fixed + rows


def test_fractions_are_those_of_the_better_of_two_measurements() -> None:
    timing = decode.Timing(8, "cycle", 10.0, 40_000_000, 1.0, 1.0)
    ceilings = Ceilings(4000.0, 4100.0).best(Ceilings(4500.0, 4000.0))
    assert ceilings == Ceilings(4500.0, 4100.0)
    (final,) = against([timing], ceilings)
    assert final.read_fraction == pytest.approx(4000 / 4500) and final.update_fraction == pytest.approx(4000 / 4100)
    assert by_batch([final]) == {8: {"cycle": final}}


@pytest.mark.parametrize("drafts", [0, 3])
def test_tables(drafts: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.setattr(cli_bench, "environment", lambda: {"gpu": "a GPU", "torch": "2", "triton": "3"})
    phases = WINDOW_PHASES if drafts else decode.PHASES
    timings = [decode.Timing(8, phase, 10.0 + i, 40_000_000, 0.9, 0.8) for i, phase in enumerate(phases)]
    cli_bench._show("a model", Plan((SPECS[0],), num_draft_tokens=drafts), Ceilings(4500.0, 4000.0), timings)
    printed = capsys.readouterr().out
    row = next(line.split() for line in printed.splitlines() if line.strip().startswith("8 "))
    if drafts:
        assert row == ["8", "10.0", "11.0", "12.0", "13.0", "1.18x", "11.7", "3077", "0.90"]
    else:
        assert row == ["8", "10.0", "11.0", "12.0", "13.0", "0.91x", "3636", "0.90", "0.80"]
    assert "ceilings: read 4500 GB/s" in printed and ("windows of 4 tokens" in printed) == bool(drafts)
