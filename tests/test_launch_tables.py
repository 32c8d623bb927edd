"""What no entry of the launch tables of one-token steps may combine."""

from __future__ import annotations

import pytest

from replayssm.cursors import SPREAD_FROM
from replayssm.ops.delta import configs as delta

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
