"""What the demo compares: text, logits and final states of plain decoding and of ReplaySSM."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch

from replayssm.cursors import NUM_FLUSHES

TITLES = {
    "mamba2": "Mamba-2 (nemotron_h)",
    "gdn": "Gated DeltaNet (qwen3_5)",
    "kda": "Kimi Delta Attention (kimi_linear)",
}
PROMPT = '''class LineReader:
    """Read a text file line by line."""

    def __init__(self, path, encoding="utf-8"):
        self.path = path
        self.encoding = encoding
        self.lines = []

    def read(self):
'''
FP32_UNIT = 2.0**-23
_NOT_TEXT = [byte for byte in range(256) if byte != 10 and not 32 <= byte < 127]


@dataclass(frozen=True)
class LayerState:
    """One layer's final recurrent state: ReplaySSM's against the plain cache's, relative to its largest element."""

    layer_idx: int
    bit_equal: bool
    error: float
    allowed: float

    @property
    def agrees(self) -> bool:
        """Within what is allowed (NaN is not)."""
        return self.bit_equal or self.error <= self.allowed


@dataclass(frozen=True)
class Comparison:
    """One model, generated from twice with the same seed."""

    family: str
    title: str
    prompt: str
    plain_text: str
    replay_text: str
    tokens: int
    flushes: int
    logit_error: float
    allowed: float
    stepwise_bytes: int
    replay_bytes: int
    layers: tuple[LayerState, ...]
    seconds: float

    @property
    def traffic_ratio(self) -> float:
        """Counted bytes of a stepwise step over those of a replay step."""
        return self.stepwise_bytes / self.replay_bytes

    @property
    def agrees(self) -> bool:
        """Same text, logits within tolerance, every layer's state within what is allowed."""
        same_text = self.plain_text == self.replay_text
        return same_text and self.logit_error <= self.allowed and all(layer.agrees for layer in self.layers)

    def as_dict(self) -> dict[str, object]:
        """A plain structure for JSON."""
        return {**asdict(self), "traffic_ratio": self.traffic_ratio, "agrees": self.agrees}


class _Ticker:
    """A transformers streamer that only counts tokens."""

    def __init__(self, on_token: Callable[[], object]) -> None:
        self._on_token = on_token

    def put(self, value: torch.Tensor) -> None:
        if value.numel() == 1:
            self._on_token()

    def end(self) -> None:
        """Nothing to flush."""


def compare(
    family: str, device: torch.device, tokens: int, buffer_len: int, on_token: Callable[[], object]
) -> Comparison:
    """Generate `tokens` bytes with the plain cache and with ReplaySSM, from the same prompt and seed."""
    from replayssm.drift.models import load
    from replayssm.integrations.transformers import enable

    started = time.perf_counter()
    model = load(family, device)
    model.generation_config.pad_token_id = 0
    plain = _generate(model, tokens, on_token)
    with enable(model, buffer_len=buffer_len) as handle:
        replay = _generate(model, tokens, on_token)
        flushes = int(replay.past_key_values.core.cursors[0, NUM_FLUSHES])
        indices = [spec.layer_idx for spec in handle.plan.layers]
        layers = tuple(_compare_layer(i, plain.past_key_values, replay.past_key_values, tokens) for i in indices)
        step = handle.plan.step_bytes(1)
    return Comparison(
        family=family,
        title=TITLES[family],
        prompt=PROMPT,
        plain_text=_text(plain),
        replay_text=_text(replay),
        tokens=tokens,
        flushes=flushes,
        logit_error=_relative_error(torch.stack(replay.logits), torch.stack(plain.logits)),
        allowed=_allowed(tokens),
        stepwise_bytes=step.stepwise,
        replay_bytes=step.replay,
        layers=layers,
        seconds=time.perf_counter() - started,
    )


def _generate(model: Any, tokens: int, on_token: Callable[[], object]) -> Any:
    prompt = torch.tensor([list(PROMPT.encode())], device=model.device)
    torch.manual_seed(0)
    return model.generate(
        prompt,
        attention_mask=torch.ones_like(prompt),
        max_new_tokens=tokens,
        do_sample=True,
        temperature=0.6,
        top_k=0,
        suppress_tokens=_NOT_TEXT,
        streamer=_Ticker(on_token),
        return_dict_in_generate=True,
        output_logits=True,
    )


def _text(output: Any) -> str:
    return bytes(output.sequences[0, len(PROMPT.encode()) :].tolist()).decode("ascii")


def _compare_layer(layer_idx: int, plain: Any, replay: Any, tokens: int) -> LayerState:
    expected, found = (cache.layers[layer_idx].recurrent_states[0] for cache in (plain, replay))
    return LayerState(
        layer_idx=layer_idx,
        bit_equal=torch.equal(found, expected),
        error=_relative_error(found, expected),
        allowed=_allowed(tokens),
    )


def _relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference over the largest expected magnitude."""
    return float((found - expected).abs().max() / expected.abs().max())


def _allowed(tokens: int) -> float:
    """One unit in the last place of fp32 for every generated token: errors of rounding that only ever add up."""
    return tokens * FP32_UNIT
