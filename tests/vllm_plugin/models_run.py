"""Engines of several models, one after the other in this process: `python models_run.py SPECS.json RESULTS.json`.

SPECS: a list of what `engine_run` takes, with the plugin on. Every engine serves its requests twice: through the ring,
then by layers that have lost their groups and do what vLLM's own do. RESULTS: {"plugin", "stock", "replayed"} of each.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import engine_run


def run(spec: dict[str, Any]) -> dict[str, Any]:
    llm = engine_run.build(spec)
    replayed = [layer for layer in engine_run.layers(llm).values() if getattr(layer, "group", None) is not None]
    found: dict[str, Any] = {"replayed": len(replayed)}
    for name in ("plugin", "stock"):
        results, _ = engine_run.generate(llm, spec)
        engine_run.score(llm, spec["prompts"], results)
        found[name] = {"requests": results}
        for layer in replayed:
            layer.group = None
    return found


if __name__ == "__main__":
    specs = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps([run(spec) for spec in specs]))
    sys.stdout.flush()
    os._exit(0)  # vLLM's threads must not hold up the exit
