"""The plugin's option: one JSON object, from vLLM's `--additional-config` or from an environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from replayssm.checks import check_choice, check_int, fail
from replayssm.formats import CHECKPOINT_FORMATS, READ_FORMATS
from replayssm.plan import MAX_BUFFER_LEN, Plan
from replayssm.plan_checks import REPLAYS

KEY = "replayssm"
ENVIRONMENT = "REPLAYSSM_VLLM"
STATE_DTYPES = {format.dtype: name for name, format in CHECKPOINT_FORMATS.items() if format.dtype is not None}
OFF = ("", "0", "false", "off", "no", "null", "none")


@dataclass(frozen=True)
class Options:
    """What a user may choose; the rest follows from vLLM's own configuration.

    buffer_len, read, spread_flushes, replay: as in `Plan`. checkpoint: format of the state; None: what vLLM would store
    it in (`--mamba-ssm-cache-dtype`).
    """

    buffer_len: int = Plan.buffer_len
    checkpoint: str | None = None
    read: str = "none"
    spread_flushes: bool | None = None
    replay: str = "auto"

    def __post_init__(self) -> None:
        check_int("buffer_len", self.buffer_len, 1, MAX_BUFFER_LEN)
        check_choice("checkpoint", self.checkpoint, (None, *STATE_DTYPES.values()))
        check_choice("read", self.read, READ_FORMATS)
        check_choice("spread_flushes", self.spread_flushes, (None, True, False))
        check_choice("replay", self.replay, REPLAYS)


def chosen_options(additional_config: object, environ: Mapping[str, str] = os.environ) -> Options | None:
    """The options, or None if nobody asked for the plugin; `--additional-config` wins over the environment.

    Raises ReplayError for an unknown name, a value of the wrong type, and text that is not JSON.
    """
    if isinstance(additional_config, Mapping) and KEY in additional_config:
        return _parse(f"additional_config[{KEY!r}]", additional_config[KEY])
    text = environ.get(ENVIRONMENT, "")
    if text.strip().lower() in OFF:
        return None
    try:
        value = json.loads(text)
    except ValueError:
        raise fail(ENVIRONMENT, text, 'a JSON object such as {"buffer_len": 16}, true or false') from None
    return _parse(ENVIRONMENT, value)


def _parse(source: str, value: Any) -> Options | None:
    if value is None or value is False or (type(value) is int and value == 0):
        return None
    if isinstance(value, str) and value.strip().lower() in OFF:
        return None
    if value is True or (type(value) is int and value == 1):
        return Options()
    if not isinstance(value, Mapping):
        raise fail(source, value, "an object of options, true or false")
    names = [field.name for field in fields(Options)]
    for name in value:
        check_choice(f"a name in {source}", name, names)
    return Options(**value)
