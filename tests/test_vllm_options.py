"""The vLLM plugin's option, without vLLM: what enables it, what does not, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from replayssm import ReplayError
from replayssm.integrations.vllm.options import ENVIRONMENT, Options, chosen_options
from replayssm.integrations.vllm.support import check_version


@pytest.mark.parametrize("value", [False, None, 0, "false", "False", "0", "", "off", "no"])
def test_off(value: Any) -> None:
    assert chosen_options({"replayssm": value}, {}) is None
    assert chosen_options({}, {ENVIRONMENT: str(value)}) is None
    # The configuration wins, so that a model can be started without what the environment asks for.
    assert chosen_options({"replayssm": value}, {ENVIRONMENT: "true"}) is None


@pytest.mark.parametrize("text", ["true", "True", "on", "yes", "1", "{}", ' {"buffer_len": 16} '])
def test_on_by_the_environment(text: str) -> None:
    assert chosen_options({}, {ENVIRONMENT: text}) == Options(buffer_len=16)
    assert chosen_options(None, {ENVIRONMENT: text}) == Options(buffer_len=16)


def test_on_by_the_configuration() -> None:
    given = {"buffer_len": 8, "checkpoint": "bf16", "spread_flushes": False, "replay": "serial"}
    assert chosen_options({"replayssm": given}, {}) == Options(**given)
    assert chosen_options({"replayssm": True}, {}) == Options()
    for word in (1, "true", "On", "1"):
        assert chosen_options({"replayssm": word}, {}) == Options()
    assert chosen_options({"other": 1}, {}) is None


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"bufer_len": 8}, "bufer_len"),
        ("yes please", "yes please"),
        (2, "2"),
        ([1], r"\[1\]"),
        ([], r"is \[\]"),
        (0.0, "is 0.0"),
        ({1: 2}, "is 1; allowed: buffer_len"),
        ({"buffer_len": "8"}, "buffer_len is '8'"),
        ({"spread_flushes": 1}, "spread_flushes is 1; allowed: None, True, False"),
        ({"read": {"0": "int8"}}, "read is"),
        ({"checkpoint": "fp8"}, "allowed: None, fp32, fp16, bf16"),
    ],
)
def test_refused(value: Any, message: str) -> None:
    with pytest.raises(ReplayError, match=message):
        chosen_options({"replayssm": value}, {})


def test_text_that_is_not_json_is_refused() -> None:
    with pytest.raises(ReplayError, match=ENVIRONMENT):
        chosen_options({}, {ENVIRONMENT: "buffer_len=8"})


def test_versions() -> None:
    check_version("0.33.0")
    check_version("0.32.0+cpu")
    for version in ("0.31.2", "0.34.0", "1.0.0"):
        with pytest.raises(ReplayError, match=version):
            check_version(version)
