"""benchmarks/serve.py without vLLM: what engines are told, how traces are read, and what the table says."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "benchmarks"))

import serve
import serve_engine


def asked(*arguments: str, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    monkeypatch.setattr(sys, "argv", ["serve.py", *arguments])
    return serve.parse()


def test_engines_differ_by_the_plugin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    args = asked("--options", "{}", '{"read": "nvfp4"}', "--draft-tokens", "4", monkeypatch=monkeypatch)
    engines = serve.specs(args, "folder")
    assert list(engines) == ["stock", "replayssm {}", 'replayssm {"read": "nvfp4"}']
    drafts = [spec["llm"]["speculative_config"] for spec in engines.values()]
    assert drafts[0] == drafts[1] == drafts[2] and drafts[0]["num_speculative_tokens"] == 4
    assert [spec["llm"].get("additional_config") for spec in engines.values()] == [
        None,
        {"replayssm": {}},
        {"replayssm": {"read": "nvfp4"}},
    ]


def test_every_engine_has_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit, match="3 values for 2 engines"):
        serve.specs(asked("--kv-gib", "1", "2", "3", monkeypatch=monkeypatch), "folder")
    engines = serve.specs(asked("--kv-gib", "60", "20", "--batches", "256", "1", monkeypatch=monkeypatch), "folder")
    given = serve_engine.arguments(engines["replayssm {}"] | {"draft_tokens": 4}, Path("traces"))
    assert given["kv_cache_memory_bytes"] == 20 * 2**30
    assert given["compilation_config"] == {"cudagraph_capture_sizes": [5, 1280]}  # whole windows of the batches
    assert given["max_num_seqs"] == 256
    assert "kv_cache_memory_bytes" not in serve_engine.arguments(engines["stock"] | {"kv_gib": 0}, Path("traces"))


def test_busy_time_is_a_union(tmp_path: Path) -> None:
    def event(name: str, start: float, length: float, kind: str = "kernel") -> dict[str, Any]:
        return {"ph": "X", "cat": kind, "name": name, "ts": start, "dur": length}

    events = [event("a", 0, 10), event("b", 5, 10), event("a", 100, 31), event("host", 0, 1e6, "cpu_op")]
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"traceEvents": events}))
    read = serve_engine.read_trace(trace)
    assert read["busy_ms"] == pytest.approx(46 / serve_engine.STEPS / 1e3)
    assert [name for name, _, _ in read["kernels"]] == ["a", "b"]


def test_rows_compare_tokens_and_memory() -> None:
    step = {"batch": 8, "busy_ms": 4.0, "accepted": 2.5, "wall_ms": 5.0}
    results: dict[str, Any] = {
        "stock": {"concurrency": 30.0, "steps": [step]},
        "replayssm {}": {"concurrency": 30.0, "steps": [step | {"busy_ms": 2.0}, step | {"batch": 1}]},
    }
    engines = {"stock": {"kv_gib": 60.0}, "replayssm {}": {"kv_gib": 20.0}}
    assert serve.rows("stock", engines, results) == ["| stock | 8 | 4.000 | 2.50 | 5000 | 1.00x | 5.00 | 30.0 |"]
    first, second = serve.rows("replayssm {}", engines, results)
    assert first == "| replayssm {} | 8 | 2.000 | 2.50 | 10000 | 2.00x | 5.00 | 90.0 |"
    assert "| - |" in second  # stock has no such batch
    assert "failed" in serve.rows("stock", engines, {"stock": None})[0]
