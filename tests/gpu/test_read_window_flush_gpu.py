"""Windows with a read copy on a GPU: every configuration, and how programs share what flushes."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))
import read_window_case
from read_window_case import BF16, FP32, KIMI, NANO, QWEN, SUPER, check, make_case, replay_of
from test_window_gpu import name

from replayssm import KDASpec, LayerSpec

pytestmark = pytest.mark.gpu


def delta_configs() -> list[Any]:
    """Configurations of GDN's table."""
    from replayssm.ops.delta.read_window_configs import STEP

    return [config for _, config in STEP[False, False]]


def all_configs() -> list[Any]:
    """Configurations of the tables, and the portable kernel's."""
    from replayssm.ops.delta import read_window_configs as delta
    from replayssm.ops.mamba2 import read_window_launch as mamba2

    cases = [(KIMI if kda else QWEN, config) for (kda, _), table in delta.STEP.items() for _, config in table]
    cases += [(spec, delta.PORTABLE) for spec in (QWEN, KIMI)]
    cases += [(SUPER, config) for _, configs in mamba2.STEP for config in configs]
    return [*cases, *((NANO, configs[-1]) for _, configs in mamba2.STEP)]


@pytest.mark.parametrize("buffer_len", [16, 32])
@pytest.mark.parametrize(("spec", "config"), all_configs(), ids=str)
def test_every_configuration(spec: LayerSpec, config: Any, buffer_len: int) -> None:
    check(spec, 4, "nvfp4", buffer_len=buffer_len, replay=replay_of(spec), window_config=config)


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
    monkeypatch.setattr(read_window_case, "make_case", lambda *args, **options: case)
    check(QWEN, 4, "nvfp4", replay="chunk", window_config=config)


@pytest.mark.parametrize("entry", [0, -1])
@pytest.mark.parametrize("crew", [1, 3, 7])
@pytest.mark.parametrize("read", ["nvfp4", "int8"])
@pytest.mark.parametrize("spec", [QWEN, KIMI], ids=name)
def test_shares_that_cross_rows_and_k_heads(spec: LayerSpec, read: str, crew: int, entry: int) -> None:
    """Flushing programs whose equal shares begin and end anywhere."""
    from replayssm.ops.delta.read_window_configs import STEP

    config = STEP[isinstance(spec, KDASpec), False][entry][1]
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
    monkeypatch.setattr(read_window_case, "make_case", lambda *args, **options: case)
    check(spec, 4, "nvfp4", window_config=replace(few_programs(spec), crew=crew))
