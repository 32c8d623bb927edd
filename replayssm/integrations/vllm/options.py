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
ON = ("1", "true", "on", "yes")
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
    try:
        return _parse(ENVIRONMENT, json.loads(text))
    except json.JSONDecodeError:
        return _parse(ENVIRONMENT, text)


def _parse(source: str, value: Any) -> Options | None:
    word = str(value).strip().lower() if value is None or isinstance(value, (int, str)) else None
    if word in ON or word in OFF:
        return Options() if word in ON else None
    if not isinstance(value, Mapping):
        raise fail(source, value, 'an object of options such as {"buffer_len": 16}, true or false')
    names = [field.name for field in fields(Options)]
    for name in value:
        check_choice(f"a name in {source}", name, names)
    return Options(**value)
