"""Engines in processes of their own: `engine_run.py` on a specification."""

from __future__ import annotations

import atexit
import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
QUIET = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
TIMEOUT = 600.0
_started: set[int] = set()


def run_engine(folder: Path, spec: dict[str, Any], **environment: str) -> tuple[int, str]:
    """Exit status and log of an engine in a process of its own; its result lies in RESULT.json."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "spec.json").write_text(json.dumps(spec))
    command = [sys.executable, str(HERE / "engine_run.py"), str(folder / "spec.json"), str(folder / "result.json")]
    with (folder / "log.txt").open("w") as log:
        process = subprocess.Popen(
            command,
            env={**os.environ, **QUIET, "OMP_NUM_THREADS": "1", **environment},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        _started.add(process.pid)
        try:
            code = process.wait(TIMEOUT)
        finally:
            _kill(process.pid)
    return code, (folder / "log.txt").read_text()


@atexit.register
def kill_all() -> None:
    for process in list(_started):
        _kill(process)


def _kill(process: int) -> None:
    """End an engine and the workers of its other ranks."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process, signal.SIGKILL)
    _started.discard(process)


def result_of(folder: Path, spec: dict[str, Any], **environment: str) -> dict[str, Any]:
    code, log = run_engine(folder, spec, **environment)
    assert code == 0, log[-4000:]
    return {**json.loads((folder / "result.json").read_text()), "log": log}


def gpus() -> list[str]:
    """The devices that may be used, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = torch.cuda.device_count()
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",")[:count] if named else [str(i) for i in range(count)]


def gpu_environment() -> dict[str, str]:
    """What starts an engine sooner, and what stands in for packages that vLLM would like and can do without."""
    chosen = {
        "VLLM_TRITON_FORCE_FIRST_CONFIG": "1",
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "NCCL_NVLS_ENABLE": "0",
        "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    }
    if importlib.util.find_spec("flashinfer") is None:
        chosen["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    if importlib.util.find_spec("cutlass") is None:
        chosen["VLLM_KIMI_K3_GEMM_AR"] = "0"
    return chosen


class Engines:
    """Engines on the GPUs, as many at once as there are processors; `[name]` waits for one."""

    def __init__(self, work: Path, specs: dict[str, dict[str, Any]]) -> None:
        """specs: by name."""
        self._work, self._devices = work, gpus()
        self._pool = ThreadPoolExecutor(max_workers=os.cpu_count())
        self._running: dict[str, Future[dict[str, Any]]] = {}
        for i, (name, spec) in enumerate(specs.items()):
            ranks = spec["llm"].get("tensor_parallel_size", 1)
            if ranks <= len(self._devices):
                devices = [self._devices[(i + k) % len(self._devices)] for k in range(ranks)]
                self._running[name] = self._pool.submit(self._run, name, spec, devices)

    def _run(self, name: str, spec: dict[str, Any], devices: list[str]) -> dict[str, Any]:
        environment = {**gpu_environment(), "CUDA_VISIBLE_DEVICES": ",".join(devices)}
        return result_of(self._work / name, spec, **environment)

    def __contains__(self, name: str) -> bool:
        return name in self._running

    def __getitem__(self, name: str) -> dict[str, Any]:
        return self._running[name].result()

    def close(self) -> None:
        """Start no more and end those that run."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        kill_all()
