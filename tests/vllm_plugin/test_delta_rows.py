"""Rows of a step as vLLM's own metadata for Gated DeltaNet describes them: drafts, plain decoding, prefills, mixed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import save
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.attention.backend import CommonAttentionMetadata
from vllm.v1.attention.backends.gdn_attn import GDNAttentionMetadataBuilder
from vllm.v1.kv_cache_interface import MambaSpec

from replayssm import GDNSpec, Plan
from replayssm.integrations.vllm.delta_rows import delta_rows, only_prefills, run_part, token_parts

DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 2}
GDN = GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=8, head_v_dim=6)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save("qwen3_next", tmp_path_factory.mktemp("rows") / "qwen3_next")


def metadata_of(folder: Path, drafts: bool, done: list[int], prompts: list[int], lens: list[int]) -> Any:
    """vLLM's metadata of a step: done tokens, prompt length and tokens of every request; blocks are 11, 12, ..."""
    extra: dict[str, Any] = {"speculative_config": DRAFTS} if drafts else {}
    common = {"skip_tokenizer_init": True, "enable_prefix_caching": False, "enforce_eager": True}
    config = EngineArgs(str(folder), max_model_len=256, **common, **extra).create_engine_config()
    spec = MambaSpec(block_size=256, shapes=((3, 8), (4, 6, 8)), dtypes=(torch.bfloat16, torch.float32))
    builder = GDNAttentionMetadataBuilder(spec, ["a"], config, torch.device("cpu"))
    starts = torch.tensor([0, *lens]).cumsum(0).int()
    totals = torch.tensor(done) + torch.tensor(lens)
    prefilling = torch.tensor(done) < torch.tensor(prompts)
    batch = CommonAttentionMetadata(
        query_start_loc=starts,
        query_start_loc_cpu=starts,
        seq_lens=totals.int(),
        num_reqs=len(lens),
        num_actual_tokens=sum(lens),
        max_query_len=max(lens),
        max_seq_len=int(totals.max()),
        block_table_tensor=torch.arange(11, 11 + len(lens)).int()[:, None],
        slot_mapping=torch.zeros(sum(lens), dtype=torch.int64),
        is_prefilling=prefilling,
        seq_lens_cpu_upper_bound=totals.int(),
    )
    if not drafts:
        return builder.build(0, batch)
    accepted = torch.arange(1, len(lens) + 1).int()
    draft_counts = torch.where(prefilling, -1, torch.tensor(lens) - 1).int()
    return builder.build(0, batch, accepted, draft_counts)


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
