"""What this machine offers: versions, backends and GPUs."""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version

PACKAGES = ("replayssm", "torch", "triton", "transformers", "numpy")


@dataclass(frozen=True)
class GPU:
    """One visible CUDA or ROCm device."""

    index: int
    name: str
    capability: str
    memory_bytes: int


@dataclass(frozen=True)
class Environment:
    """Versions (None: not installed), the backends that run here, and the GPUs torch sees."""

    python: str
    platform: str
    packages: dict[str, str | None]
    cuda: str | None
    hip: str | None
    backends: dict[str, str]
    gpus: tuple[GPU, ...]

    def as_dict(self) -> dict[str, object]:
        """A plain structure for JSON."""
        return asdict(self)


def package_version(name: str) -> str | None:
    """The installed version of `name`, or None."""
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def require(package: str, extra: str) -> None:
    """Raise unless `package` is installed, which comes with one of our extras."""
    from replayssm.checks import ReplayError

    if package_version(package) is None:
        raise ReplayError(f"{package} is not installed; allowed after: pip install 'replayssm[{extra}]'")


def collect() -> Environment:
    """Look at this process's Python, packages and devices."""
    import torch

    packages = {name: package_version(name) for name in PACKAGES}
    gpus = tuple(_gpu(index) for index in range(torch.cuda.device_count())) if torch.cuda.is_available() else ()
    return Environment(
        python=platform.python_version(),
        platform=f"{platform.system()} {platform.machine()}",
        packages=packages,
        cuda=torch.version.cuda,
        hip=torch.version.hip,
        backends=_backends(packages["triton"] is not None, bool(gpus)),
        gpus=gpus,
    )


def _gpu(index: int) -> GPU:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return GPU(index, properties.name, f"{properties.major}.{properties.minor}", properties.total_memory)


def _backends(has_triton: bool, has_gpu: bool) -> dict[str, str]:
    """Each backend with "yes" or the reason why it does not run here."""
    missing = [
        text for have, text in ((has_triton, "triton is not installed"), (has_gpu, "torch sees no GPU")) if not have
    ]
    return {"torch": "yes", "triton": "; ".join(missing) or "yes"}
