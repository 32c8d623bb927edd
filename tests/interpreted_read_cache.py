"""Whole lifecycles with the kernels for read copies, in Triton's interpreter (TRITON_INTERPRET=1)."""

from __future__ import annotations

import pytest
import torch

from replayssm import GDNSpec, KDASpec, LayerSpec, Mamba2Spec, Plan, ReplayError, check
from replayssm.check_cases import CheckCase

MAMBA2 = Mamba2Spec(num_heads=2, head_dim=8, d_state=32, n_groups=1)
GDN = GDNSpec(num_k_heads=1, num_v_heads=2, head_k_dim=32, head_v_dim=8)
KDA = KDASpec(num_k_heads=1, num_v_heads=1, head_k_dim=32, head_v_dim=8, lower_bound=-5.0)
CASES = (
    (MAMBA2, "int8", "fp32", "nearest"),
    (MAMBA2, "nvfp4", "fp16", "nearest"),
    (MAMBA2, "fp8", "fp8", "stochastic"),
    (GDN, "nvfp4", "fp32", "nearest"),
    (GDN, "none", "fp8", "nearest"),
    (GDN, "int8", "fp16", "stochastic"),
    (KDA, "fp8", "fp16", "nearest"),
    (KDA, "nvfp4", "fp8", "nearest"),
    (KDA, "none", "bf16", "stochastic"),
)


@pytest.mark.parametrize(("spec", "read", "checkpoint", "rounding"), CASES)
def test_a_cache_decodes_past_a_flush(
    spec: LayerSpec, read: str, checkpoint: str, rounding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = CheckCase.plan
    monkeypatch.setattr(CheckCase, "plan", lambda *arguments: plan(*arguments).with_options(buffer_len=3))
    monkeypatch.setattr(check, "FLUSHES", 2)
    case = CheckCase(spec, "bf16", checkpoint, "decode", 2, read, rounding=rounding)
    result = check.run_check(case, torch.device("cpu"), backend="triton")
    assert result.passed, result


def test_plans_name_what_they_run_and_refuse_what_they_cannot() -> None:
    plan = Plan((MAMBA2,), read="int8", backend="triton")
    assert list(plan.kernels(4)) == ["mamba2 2x8x32, int8"]
    odd = Plan((Mamba2Spec(2, 8, 6, 1),), checkpoint="bf16", rounding="stochastic", backend="triton")
    with pytest.raises(ReplayError, match="rounding is 'stochastic' with K = 6"):
        odd.check_runnable()
