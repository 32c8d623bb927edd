"""Rows of a step as vLLM's own metadata for Gated DeltaNet describes them: drafts, plain decoding, prefills, mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import save
from step_metadata import step_metadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder

from replayssm import GDNSpec, Plan
from replayssm.integrations.vllm.delta_rows import delta_rows, only_prefills, run_part, token_parts

GDN = GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3_next", tmp_path_factory.mktemp("rows") / "qwen3_next")


def metadata_of(folder: Path, *step: Any) -> Any:
    """`step_metadata` of Gated DeltaNet."""
    return step_metadata(GDNAttentionMetadataBuilder, folder, *step)


def plan_for(drafts: bool) -> Plan:
    return Plan((GDN,), num_draft_tokens=3 if drafts else 0)


def test_windows_alone(folder: Path) -> None:
    metadata = metadata_of(folder, True, [20, 30, 40], [9, 9, 9], [4, 1, 3])
    rows = delta_rows(plan_for(True), metadata)
    assert rows.decodes is not None and rows.accepted is not None and rows.prefills is None
    assert rows.decodes.slot_indices.tolist() == [11, 12, 13]
    assert rows.decodes.query_start_loc.tolist() == [0, 4, 5, 8]
    assert rows.accepted.tolist() == [1, 2, 3]
    assert rows.decodes.max_window_len == 4
    assert token_parts(metadata)[0] == slice(0, 8)


def test_windows_among_prefills(folder: Path) -> None:
    """A request that starts, two with windows around one whose prompt goes on, and a prompt's last token."""
    metadata = metadata_of(folder, True, [20, 10, 30, 0, 16], [9, 40, 9, 7, 17], [4, 5, 2, 7, 1])
    rows = delta_rows(plan_for(True), metadata)
    assert rows.decodes is not None and rows.accepted is not None
    assert rows.prefills is not None and rows.continued is not None
    assert rows.decodes.slot_indices.tolist() == [11, 13]
    assert rows.decodes.query_start_loc.tolist() == [0, 4, 6]
    assert rows.accepted.tolist() == [1, 3]
    assert rows.prefills.tolist() == [12, 14, 15]
    assert rows.continued.tolist() == [12, 0, 15]
    x, out = torch.arange(19.0)[:, None], torch.full((19, 1), -1.0)
    for part in token_parts(metadata):
        run_part(part, (x,), out, lambda given, result: result.copy_(given))
    assert torch.equal(out, x)
    assert token_parts(metadata)[0].tolist() == [0, 1, 2, 3, 9, 10]
    alone = only_prefills(metadata)
    assert (alone.num_prefills, alone.num_prefill_tokens, alone.num_spec_decodes) == (3, 13, 0)
    assert alone.non_spec_query_start_loc.tolist() == [0, 5, 12, 13]
    assert alone.non_spec_state_indices_tensor.tolist() == [12, 14, 15]


@pytest.mark.parametrize("drafts", [False, True])
def test_one_token_a_row_among_prefills(folder: Path, drafts: bool) -> None:
    """Without drafts rows of one token come first; with them, prompts that end in one token may be all there is."""
    if drafts:
        metadata = metadata_of(folder, True, [16, 8], [17, 9], [1, 1])
        rows = delta_rows(plan_for(True), metadata)
        assert rows.decodes is not None and rows.prefills is None and rows.accepted is None
        assert rows.decodes.slot_indices.tolist() == [11, 12] and rows.decodes.query_start_loc is None
        return
    metadata = metadata_of(folder, False, [20, 30, 12, 0], [9, 9, 40, 6], [1, 1, 8, 6])
    rows = delta_rows(plan_for(False), metadata)
    assert rows.decodes is not None and rows.prefills is not None and rows.continued is not None
    assert rows.decodes.slot_indices.tolist() == [11, 12] and rows.decodes.query_start_loc is None
    assert (rows.prefills.tolist(), rows.continued.tolist()) == ([13, 14], [13, 0])
    assert token_parts(metadata) == (slice(0, 2), slice(2, None))
    assert only_prefills(metadata).non_spec_query_start_loc.tolist() == [0, 8, 14]
