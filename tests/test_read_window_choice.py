"""Which kernels a window step with a read copy takes: the launcher decides from what the host knows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from test_read_window_gpu import BF16, FP32, QWEN, make_case, new_layer, run

from replayssm.ops.delta import read_launch, read_window_launch


class Recorded:
    """Stands for a kernel."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *args, **options: None


def chosen(monkeypatch: pytest.MonkeyPatch, arch: str, max_committed: int) -> list[str]:
    picked: list[str] = []

    def gluon(*args: Any) -> list[Any]:
        picked.append("gluon")
        return []

    def portable(*args: Any) -> Any:
        picked.append("portable")
        return Recorded(), 1, {}

    monkeypatch.setattr(read_launch, "device_arch", lambda device: arch)
    monkeypatch.setattr(read_window_launch, "_gluon", gluon)
    monkeypatch.setattr(read_window_launch, "_portable", portable)
    case = make_case(QWEN, 4, False, BF16, FP32)
    layer = new_layer(case, "nvfp4", False, "cpu")
    run(read_launch.delta_read_step, QWEN, case, layer, False, max_committed=max_committed)
    return picked


@pytest.mark.parametrize(
    ("arch", "max_committed", "kernel"),
    [("sm90", 0, "gluon"), ("sm90", 16, "gluon"), ("sm90", 17, "portable"), ("sm80", 0, "portable")],
)
def test_a_flush_of_more_rows_than_kernels_lay_out_is_portable(
    monkeypatch: pytest.MonkeyPatch, arch: str, max_committed: int, kernel: str
) -> None:
    assert chosen(monkeypatch, arch, max_committed) == [kernel]
