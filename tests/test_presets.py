"""Named model shapes."""

from __future__ import annotations

import pytest

from replayssm.checks import ReplayError
from replayssm.presets import PRESETS, preset


@pytest.mark.parametrize(
    ("name", "count", "family", "state_elements"),
    [
        ("nemotron-3-nano-4b", 21, "mamba2", 96 * 80 * 128),
        ("nemotron-3-super-120b-a12b", 40, "mamba2", 128 * 64 * 128),
        ("granite-4-hybrid", 36, "mamba2", 128 * 64 * 128),
        ("falcon-h1-34b", 72, "mamba2", 32 * 128 * 256),
        ("qwen3.5-4b", 24, "gdn", 32 * 128 * 128),
        ("qwen3.5-122b-a10b", 36, "gdn", 64 * 128 * 128),
        ("qwen3-next-80b-a3b", 36, "gdn", 32 * 128 * 128),
        ("kimi-linear-48b", 20, "kda", 32 * 128 * 128),
        ("kimi-k3", 69, "kda", 96 * 128 * 128),
        ("glm-5.3-flash", 34, "kda", 64 * 128 * 128),
    ],
)
def test_presets(name: str, count: int, family: str, state_elements: int) -> None:
    specs = preset(name)
    assert name in PRESETS
    assert [spec.family for spec in specs] == [family] * count
    heads, V, K = specs[0].state_shape
    assert heads * V * K == state_elements
    assert len({spec.layer_idx for spec in specs}) == count


def test_unknown_preset_suggests_a_name() -> None:
    with pytest.raises(ReplayError, match=r"preset is 'qwen3\.5-4B-it'.*did you mean 'qwen3\.5-4b'"):
        preset("qwen3.5-4B-it")
