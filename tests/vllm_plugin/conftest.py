"""These tests start vLLM engines: they run in an environment of their own (`make test-vllm`).

A file goes to one worker, since its engines run once. On a GPU: `pytest -m gpu tests/vllm_plugin`.
"""

from __future__ import annotations

import importlib.util

collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]
