"""Named model shapes, usable without a download. A real config.json is read by `layer_specs`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from difflib import get_close_matches

from replayssm.checks import fail
from replayssm.config import GDNSpec, KDASpec, LayerSpec, Mamba2Spec


def _first(count: int) -> Iterable[int]:
    """Only the number of SSM layers is known: number them from 0."""
    return range(count)


def _not_every_fourth(count: int) -> Iterable[int]:
    """Every fourth layer is attention."""
    return (i for i in range(count) if i % 4 != 3)


_SHAPES: dict[str, tuple[LayerSpec, Callable[[int], Iterable[int]], int]] = {
    "nemotron-3-nano-4b": (Mamba2Spec(num_heads=96, head_dim=80, d_state=128, n_groups=8), _first, 21),
    "nemotron-3-super-120b-a12b": (Mamba2Spec(num_heads=128, head_dim=64, d_state=128, n_groups=8), _first, 40),
    "granite-4-hybrid": (Mamba2Spec(num_heads=128, head_dim=64, d_state=128, n_groups=1), _first, 36),
    "falcon-h1-34b": (Mamba2Spec(num_heads=32, head_dim=128, d_state=256, n_groups=2), _first, 72),
    "qwen3.5-4b": (GDNSpec(16, 32, 128, 128), _not_every_fourth, 32),
    "qwen3.5-122b-a10b": (GDNSpec(16, 64, 128, 128), _not_every_fourth, 48),
    "qwen3-next-80b-a3b": (GDNSpec(16, 32, 128, 128), _not_every_fourth, 48),
    "kimi-linear-48b": (KDASpec(32, 32, 128, 128), _first, 20),
    "kimi-k3": (KDASpec(96, 96, 128, 128, lower_bound=-5.0), _first, 69),
    "glm-5.3-flash": (KDASpec(64, 64, 128, 128, lower_bound=-5.0), _not_every_fourth, 45),
}

PRESETS: tuple[str, ...] = tuple(_SHAPES)


def preset(name: str) -> tuple[LayerSpec, ...]:
    """The SSM layers of a named model."""
    if name not in _SHAPES:
        close = get_close_matches(str(name).lower(), PRESETS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise fail("preset", name, ", ".join(PRESETS) + hint)
    shape, positions, count = _SHAPES[name]
    return tuple(replace(shape, layer_idx=i) for i in positions(count))
