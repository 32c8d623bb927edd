"""What the launch tables of one-token steps give to caches whose rows flush together, and to others."""

from __future__ import annotations

from dataclasses import replace

import pytest

from replayssm.cursors import SPREAD_FROM
from replayssm.ops.delta import configs as delta
from replayssm.ops.mamba2 import configs as mamba2

DELTA = {
    "gdn": delta.Shape(16, 64, 128, 128, False, 4, 17, True, "sm90"),
    "kda": delta.Shape(32, 32, 128, 128, True, 4, 17, True, "sm90"),
}


@pytest.mark.parametrize("shape", DELTA.values(), ids=DELTA.keys())
def test_only_rows_that_flush_at_different_steps_have_programs_that_only_flush(shape: delta.Shape) -> None:
    spread, together = delta.step_config(32, shape), delta.step_config(32, replace(shape, spread=False))
    assert spread.flushers > 0
    assert together == replace(spread, flushers=0)


@pytest.mark.parametrize("dims", [(128, 8, 64, 128), (96, 8, 80, 128)])
def test_only_rows_that_flush_at_different_steps_trade_places(dims: tuple[int, int, int, int]) -> None:
    shape = mamba2.Shape(*dims, 4, True, "sm90")
    spread, together = mamba2.step_config(32, shape), mamba2.step_config(32, replace(shape, spread=False))
    assert spread.settle > 0
    assert together == replace(spread, settle=0)


@pytest.mark.parametrize("shape", DELTA.values(), ids=DELTA.keys())
@pytest.mark.parametrize("batch", [1, 8, 32, SPREAD_FROM, 256])
def test_rows_that_trade_places_are_not_guessed(shape: delta.Shape, batch: int) -> None:
    config = delta.step_config(batch, shape)
    assert config.settle == 0 or not (config.hint or config.guess or config.flushers)
