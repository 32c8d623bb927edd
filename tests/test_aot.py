"""Every kernel compiles ahead of time for every target; on sm_90 and sm_100 none spills more than its case says (0).

On sm_90, for which launch tables are tuned, every entry of them compiles, elsewhere each kernel and dtype once;
REPLAYSSM_AOT=all (`make test-aot`) compiles every entry for sm_100, too.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget  # noqa: E402

from replayssm.ops.commit_aot import aot_cases as commit_cases  # noqa: E402
from replayssm.ops.conv_aot import aot_cases as conv_cases  # noqa: E402
from replayssm.ops.delta.aot import aot_cases as delta_cases  # noqa: E402
from replayssm.ops.delta.read_aot import aot_cases as delta_read_cases  # noqa: E402
from replayssm.ops.mamba2.aot import aot_cases as mamba2_cases  # noqa: E402
from replayssm.ops.mamba2.read_aot import aot_cases as mamba2_read_cases  # noqa: E402
from replayssm.ops.read_window_aot import aot_cases as read_window_cases  # noqa: E402
from replayssm.ops.window_aot import aot_cases as window_cases  # noqa: E402

SPILL_CHECKED = ("sm90", "sm100")
WHOLE_TABLES = SPILL_CHECKED if os.environ.get("REPLAYSSM_AOT") == "all" else ("sm90",)
PINNED = triton.__version__.startswith("3.6.")


def gpu_target(name: str) -> GPUTarget:
    return GPUTarget("hip", name, 64) if name.startswith("gfx") else GPUTarget("cuda", int(name[2:]), 32)


def by_target() -> Iterator[Any]:
    families = (
        ("mamba2", mamba2_cases),
        ("mamba2", mamba2_read_cases),
        ("delta", delta_cases),
        ("delta", delta_read_cases),
        ("window", window_cases),
        ("read-window", read_window_cases),
        ("commit", commit_cases),
        ("conv", conv_cases),
    )
    for family, cases in families:
        compiled = set()
        for case in cases():
            for target in case.targets:
                if target in WHOLE_TABLES or (case.kernel, case.state, target) not in compiled:
                    compiled.add((case.kernel, case.state, target))
                    yield pytest.param(case, target, id=f"{family}-{case.name}-{target}")


@pytest.mark.parametrize(("case", "target"), list(by_target()))
def test_compiles(case: Any, target: str, tmp_path: Path) -> None:
    compiled = triton.compile(case.source(), target=gpu_target(target), options=case.options)
    if target not in SPILL_CHECKED:
        return
    cubin = tmp_path / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = subprocess.run([cuobjdump(), "-res-usage", str(cubin)], capture_output=True, text=True, check=True).stdout
    stack = int(re.search(r"STACK:(\d+)", usage)[1])
    # The register caps are tuned for the ptxas of Triton 3.6; another may spill a few bytes under them.
    assert stack <= case.spill + (0 if PINNED else 128), usage


def cuobjdump() -> str:
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return str(bundled) if bundled.exists() else shutil.which("cuobjdump") or sys.exit("cuobjdump not found")
