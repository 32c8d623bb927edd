"""`replayssm env`: versions, backends and GPUs."""

from __future__ import annotations

from replayssm.cli.output import JsonFlag, human_bytes, print_json, print_table


def command(json: JsonFlag = False) -> None:
    """Show versions, backends and GPUs."""
    from replayssm.env import collect

    found = collect()
    if json:
        print_json(found.as_dict())
        return
    rows = [("python", found.python), ("platform", found.platform)]
    rows += [(name, version or "not installed") for name, version in found.packages.items()]
    rows += [("CUDA", found.cuda)] if found.cuda else []
    rows += [("ROCm", found.hip)] if found.hip else []
    rows += [(f"backend {name}", state) for name, state in found.backends.items()]
    rows += [
        (f"GPU {gpu.index}", f"{gpu.name} (compute {gpu.capability}, {human_bytes(gpu.memory_bytes)})")
        for gpu in found.gpus
    ]
    print_table("Environment", rows)
