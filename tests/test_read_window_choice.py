"""Which kernels a window step with a read copy takes: the launcher decides from what the host knows."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
sys.path.insert(0, str(Path(__file__).parent / "gpu"))
from read_window_case import BF16, FP32, KIMI, NANO, QWEN, SUPER, make_case, new_layer, run
from test_window_gpu import name

from replayssm import LayerSpec, Mamba2Spec
from replayssm.ops.delta import read_launch, read_window_launch
from replayssm.ops.mamba2 import read_window_launch as mamba2_window


class Recorded:
    """Stands for a kernel."""

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *args, **options: None


def chosen(monkeypatch: pytest.MonkeyPatch, arch: str, max_committed: int, window: int) -> list[str]:
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
    run(read_launch.delta_read_step, QWEN, case, layer, False, window, max_committed=max_committed)
    return picked


@pytest.mark.parametrize(
    ("arch", "max_committed", "window", "kernel"),
    [
        ("sm90", 0, 4, "gluon"),
        ("sm90", 32, 16, "gluon"),
        ("sm90", 33, 4, "portable"),
        ("sm90", 0, 17, "portable"),
        ("sm80", 0, 4, "portable"),
    ],
)
def test_more_rows_or_tokens_than_kernels_lay_out_are_portable(
    monkeypatch: pytest.MonkeyPatch, arch: str, max_committed: int, window: int, kernel: str
) -> None:
    assert chosen(monkeypatch, arch, max_committed, window) == [kernel]


@pytest.mark.parametrize("spec", [QWEN, KIMI, SUPER, NANO], ids=name)
def test_rings_of_32_rows_and_windows_of_16_tokens_have_kernels(
    monkeypatch: pytest.MonkeyPatch, spec: LayerSpec
) -> None:
    module = mamba2_window if isinstance(spec, Mamba2Spec) else read_window_launch
    monkeypatch.setattr(module, "device_arch", lambda device: "sm90")
    for buffer_len in range(1, 33):
        for window in range(1, min(buffer_len, 16) + 1):
            options: dict[str, Any] = {"checkpoint": "fp32", "read": "nvfp4", "batch": 8, "device": torch.device("cpu")}
            route = module.window_route(spec, **options, buffer_len=buffer_len, max_window_len=window)
            assert route.startswith("gluon")
