"""Models to measure: the miniatures by name, or a local Hugging Face folder."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from replayssm.checks import fail
from replayssm.drift import local_attention
from replayssm.hf_config import layer_specs

MINIATURES = ("mamba2", "gdn", "kda")
_FOLDER = Path(__file__).resolve().parents[2] / "miniatures"


def model_folder(name: str) -> Path:
    """The folder of a miniature, or `name` itself if it is a folder with a config.json."""
    folder = _FOLDER / name if name in MINIATURES else Path(name)
    if not (folder / "config.json").is_file():
        raise fail("model", name, f"{', '.join(MINIATURES)} (in a checkout), or a folder that holds a config.json")
    return folder


def load(name: str, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """A causal language model in eval mode; what was trained with a window of attention keeps it."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.utils import logging

    logging.set_verbosity_error()  # each of its optional kernels that is absent would be a warning
    logging.disable_progress_bar()
    folder = model_folder(name)
    layer_specs(folder)  # a model without SSM layers is told in our words
    try:
        config = AutoConfig.from_pretrained(folder)
        attention = local_attention.register() if hasattr(config, "attention_window") else "sdpa"
        model = AutoModelForCausalLM.from_pretrained(
            folder, config=config, dtype=dtype, attn_implementation=attention, local_files_only=True
        )
    except (OSError, ValueError) as error:
        raise fail("model", name, f"a folder that transformers loads ({error})") from error
    return model.to(device).eval()


def text_tokens(name: str, length: int, text: Path | None = None) -> torch.Tensor:
    """`length` tokens [length] of `text` (default: modules of the standard library that no miniature was trained on).

    A folder with a tokenizer has its own tokens; without one a token is a byte.
    """
    from replayssm.drift.text import held_out_text, library

    folder = model_folder(name)
    data = held_out_text(-1) if text is None else text.read_bytes()
    tokens: Sequence[int] = data
    if (folder / "tokenizer.json").is_file():
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        tokens = tokenizer(data.decode("utf-8", "replace"))["input_ids"]
    if len(tokens) < length:
        raise fail("length", length, f"at most {len(tokens)}, the tokens of {text or library()}")
    return torch.tensor(list(tokens[:length]))
