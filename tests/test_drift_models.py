"""What the accuracy laboratory runs on: models, their local attention, and texts."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from replayssm.checks import ReplayError
from replayssm.drift import local_attention
from replayssm.drift.models import load, model_folder, text_tokens
from replayssm.drift.text import HELD_OUT, held_out_text, join, library, training_documents

MINIATURE = model_folder("gdn")


class _Module:
    class config:
        attention_window = 8


@pytest.mark.parametrize("tokens", [5, 16, 17, 64, 67])
def test_local_attention_is_a_band(tokens: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 4, tokens, 6, generator=generator)
    k, v = torch.randn(2, 2, tokens, 6, generator=generator), torch.randn(2, 2, tokens, 5, generator=generator)
    distance = torch.arange(tokens)[:, None] - torch.arange(tokens)
    mask = (distance >= 0) & (distance < 8)
    full = (t.repeat_interleave(2, 1) for t in (k, v))
    expected = torch.nn.functional.scaled_dot_product_attention(q, *full, mask, scale=0.3).transpose(1, 2)
    found, _ = local_attention.attend(_Module, q, k, v, None, 0.3)
    torch.testing.assert_close(found, expected)
    for last in (1, 3):  # as with a cache
        part, _ = local_attention.attend(_Module, q[:, :, -last:], k, v, None, 0.3)
        torch.testing.assert_close(part, expected[:, -last:])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "config is "),
        ('{"model_type": "llama"}', "model_type is 'llama'"),
        ((MINIATURE / "config.json").read_text(), "allowed: a folder that transformers loads"),
    ],
)
def test_folders_that_hold_no_model(tmp_path: Path, config: str, message: str) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(ReplayError, match=message):
        load(str(tmp_path))


def test_texts_that_are_too_short(tmp_path: Path) -> None:
    (tmp_path / "text").write_bytes(b"")
    with pytest.raises(ReplayError, match="length is 8; allowed: at most 0, the tokens of"):
        text_tokens("gdn", 8, tmp_path / "text")
    (tmp_path / "text").write_bytes(bytes(range(250, 256)) * 2)
    assert text_tokens("gdn", 8, tmp_path / "text").tolist() == [250, 251, 252, 253, 254, 255, 250, 251]


def test_held_out_modules_are_not_trained_on() -> None:
    documents = training_documents()
    trained = join(documents)
    assert len(documents) > 300 and len(trained) > 5_000_000
    for name in HELD_OUT:
        if (library() / name).exists():
            assert (library() / name).read_bytes()[:4000] not in trained
    assert len(held_out_text(131072)) == 131072
    with pytest.raises(ReplayError, match="length"):
        held_out_text(10**9)
