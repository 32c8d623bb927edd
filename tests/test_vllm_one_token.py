"""Prompts of one token beside drafts: which rows become windows, and which blocks start empty. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch

from replayssm.integrations.vllm.one_token import _as_windows, _from_empty_states


class Batch(NamedTuple):
    """What the plugin reads of vLLM's description of a step's rows."""

    num_draft_tokens_np: Any
    is_prefilling_np: Any
    num_computed_prefill_tokens_np: Any
    prefill_runs_as_decode_np: Any


# A row that decodes, a prompt's last token, a prompt of one token, a prompt of five, a chunk in the middle.
ROWS = Batch(
    np.array([3, 3, 3, 0, 0]),
    np.array([False, True, True, True, True]),
    np.array([9, 8, 0, 0, 16]),
    np.array([False, True, False, False, False]),
)


def gathered(batch: Batch | None) -> Any:
    return _as_windows(lambda runner, output, dummy_run: (batch, 4))(None, None, False)


def test_a_prompt_with_placeholders_is_a_window() -> None:
    batch, uniform = gathered(ROWS)
    assert batch.prefill_runs_as_decode_np.tolist() == [False, True, True, False, False]
    assert uniform == 4


def test_other_steps_stay_as_they_are() -> None:
    assert gathered(None) == (None, 4)  # a dummy run
    for name in ("num_draft_tokens_np", "prefill_runs_as_decode_np"):  # no drafts, no prefills
        batch = ROWS._replace(**{name: None})
        assert gathered(batch)[0] is batch


def test_its_blocks_start_empty() -> None:
    started: dict[str, list[int]] = {"a": [], "b": []}
    layers = {
        name: SimpleNamespace(
            group=SimpleNamespace(start=lambda blocks, name=name: started[name].extend(blocks.tolist())),
            kv_cache=(torch.ones(20, 3, 2),),
        )
        for name in started
    }
    layers["attention"] = SimpleNamespace()
    state = SimpleNamespace(
        vllm_config=SimpleNamespace(compilation_config=SimpleNamespace(static_forward_context=layers))
    )
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(layer_names=[name]) for name in ("attention", "a", "b")])
    tables = tuple(torch.arange(5)[:, None].int() + first for first in (0, 5, 10))
    calls = []
    run = _from_empty_states(lambda *arguments: calls.append(arguments))
    run(state, gathered(ROWS)[0], tables, groups, None)
    assert len(calls) == 1 and started == {"a": [7], "b": [12]}
    assert (layers["a"].kv_cache[0] == 0).all((1, 2)).nonzero().tolist() == [[7]]
    run(state, ROWS, tables, groups, None)  # the prompt's last token goes on from its state
    run(state, ROWS._replace(prefill_runs_as_decode_np=None), tables, groups, None)
    assert len(calls) == 3 and started == {"a": [7], "b": [12]}
