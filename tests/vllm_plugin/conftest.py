"""These tests start vLLM engines: they run in an environment of their own (`make test-vllm`, a file a worker, since a file's engines run once)."""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
