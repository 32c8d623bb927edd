"""What no entry of the launch tables may combine."""

from __future__ import annotations

import pytest

from replayssm.cursors import SPREAD_FROM
from replayssm.ops.delta import configs as delta
from replayssm.ops.delta import window_launch as window

DELTA = {
    "gdn": delta.Shape(16, 64, 128, 128, False, 4, 17, True, "sm90"),
    "gdn, 32 heads": delta.Shape(16, 32, 128, 128, False, 4, 17, True, "sm90"),
    "kda": delta.Shape(32, 32, 128, 128, True, 4, 17, True, "sm90"),
}


@pytest.mark.parametrize("shape", DELTA.values(), ids=DELTA.keys())
@pytest.mark.parametrize("batch", [1, 8, 32, SPREAD_FROM, 256])
def test_rows_that_trade_places_are_not_guessed(shape: delta.Shape, batch: int) -> None:
    config = delta.step_config(batch, shape)
    assert config.flushers == 0 or (config.settle == 0 and config.interleave == 1)
    # The first programs of the grid have rows that trade no places.
    assert config.settle == 0 or not config.hint or config.hint_programs


@pytest.mark.parametrize("v_dim", [64, 128, 192, 256])
@pytest.mark.parametrize("v_heads", [16, 32, 96])
@pytest.mark.parametrize("batch", [1, 3, 8, 17, 64, 512])
def test_a_program_has_whole_heads_or_tiles_of_one(batch: int, v_heads: int, v_dim: int) -> None:
    step = delta.step_config(batch, delta.Shape(16, v_heads, 128, v_dim, False, 4, 17, True, "sm90"))
    windows = window.window_config(batch, window.WindowShape(16, v_heads, 128, v_dim, False, 4, 4, 16, "sm90"))
    for config in (step, windows):
        per_head = v_dim // config.block_v
        assert v_heads // 16 * per_head % config.num_tiles == 0
        assert config.num_tiles % per_head == 0 or per_head % config.num_tiles == 0
