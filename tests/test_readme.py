"""What the README tells people to run runs: its Python, and the options of its commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_model
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from typer.main import get_command

from replayssm.cli.app import app
from replayssm.hf_models import READERS

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_its_python_generates(tmp_path: Path) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "The": 4, "river": 5, "keeps": 6}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(tmp_path)
    tiny_model("qwen3_next").save_pretrained(tmp_path)
    names: dict[str, Any] = {"path": str(tmp_path)}
    exec(code, names)
    assert names["output"].shape == (1, 103)


@pytest.mark.parametrize("line", re.findall(r"^\| `replayssm (.*?)` \|", README, re.MULTILINE))
def test_its_commands_have_these_options(line: str) -> None:
    name, *words = line.split()
    command = get_command(app).commands[name]  # type: ignore[attr-defined]
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word.strip("[]") for word in words if "--" in word} <= known


def test_it_names_every_model_type() -> None:
    (row,) = re.findall(r"^\| models in transformers .*? \| (.*) \|$", README, re.MULTILINE)
    assert set(re.findall(r"\w+", row)) == set(READERS)
