"""The layers, dtypes, formats and modes that `replayssm check` goes through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from replayssm.checks import ReplayError
from replayssm.config import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
from replayssm.formats import READ_FORMATS
from replayssm.plan import Plan

SHAPES: tuple[LayerSpec, ...] = (
    Mamba2Spec(num_heads=8, head_dim=64, d_state=128, n_groups=2),
    Mamba2Spec(num_heads=4, head_dim=80, d_state=128, n_groups=1),
    Mamba2Spec(num_heads=2, head_dim=128, d_state=256, n_groups=2),
    GDNSpec(num_k_heads=2, num_v_heads=4, head_k_dim=128, head_v_dim=128),
    GDNSpec(num_k_heads=1, num_v_heads=4, head_k_dim=128, head_v_dim=128),
    KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=128, head_v_dim=128),
    KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=128, head_v_dim=128, lower_bound=-5.0),
)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
MODES = {"decode": 0, "verify": 3}  # drafts a step
Formats = tuple[str, str, str, str]  # activation, checkpoint, read, rounding
FORMATS: tuple[Formats, ...] = (
    *((activation, "fp32", "none", "nearest") for activation in DTYPES),
    *(("bf16", checkpoint, "none", "nearest") for checkpoint in ("bf16", "fp16", "fp8")),
    *(("bf16", "fp32", read, "nearest") for read in ("bf16", "int8", "fp8", "nvfp4")),
    *(("bf16", checkpoint, read, "nearest") for checkpoint in ("fp16", "fp8") for read in ("int8", "nvfp4")),
    *(("bf16", *pair, "stochastic") for pair in (("bf16", "none"), ("fp16", "int8"), ("fp8", "nvfp4"))),
)


@dataclass(frozen=True)
class CheckCase:
    """One layer, decoded in one mode with `rows` requests. drafts: of a step, in the place of the mode's number."""

    spec: LayerSpec
    activation: str
    checkpoint: str
    mode: str
    rows: int = 3
    read: str = "none"
    drafts: int | None = None
    rounding: str = "nearest"
    replay: str = "auto"

    def plan(self, device: torch.device, backend: str = "auto") -> Plan:
        """The plan that the case checks: small batches too are to go through the ring."""
        return Plan(
            (self.spec,),
            num_draft_tokens=MODES[self.mode] if self.drafts is None else self.drafts,
            checkpoint=self.checkpoint,
            read=self.read,
            rounding=self.rounding,
            replay=self.replay,
            activation=DTYPES[self.activation],
            device=device,
            backend=backend,
        )

    def runs_on(self, device: torch.device, backend: str = "auto") -> bool:
        """Whether the device has kernels for the case's formats."""
        try:
            self.plan(device, backend).check_runnable()
        except ReplayError:
            return False
        return True


def check_cases(
    shapes: Sequence[LayerSpec] = SHAPES,
    modes: Sequence[str] = tuple(MODES),
    batches: Sequence[int] = (3,),
    *,
    formats: Sequence[Formats] = FORMATS,
) -> list[CheckCase]:
    """Every shape in every mode and in all formats that K can be cut into."""
    return [
        CheckCase(replace(spec, layer_idx=0), activation, checkpoint, mode, rows, read, rounding=rounding)
        for spec in shapes
        for mode in modes
        for activation, checkpoint, read, rounding in formats
        if READ_FORMATS[read].fits(spec.state_shape[2])
        for rows in batches
    ]


def shrink(spec: LayerSpec, groups: int = 2) -> LayerSpec:
    """The layer with at most `groups` groups (Mamba-2) or k-heads, as many heads in each as before."""
    if isinstance(spec, Mamba2Spec):
        kept = min(groups, spec.n_groups)
        return replace(spec, num_heads=spec.num_heads // spec.n_groups * kept, n_groups=kept)
    kept = min(groups, spec.num_k_heads)
    return replace(spec, num_v_heads=spec.num_v_heads // spec.num_k_heads * kept, num_k_heads=kept)
