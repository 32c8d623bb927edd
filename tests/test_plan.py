"""Plan: validation, and bytes against cases counted by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import replayssm
from replayssm import GDNSpec, KDASpec, Mamba2Spec, Plan, ReplayCache, ReplayError, preset
from replayssm.config import LayerSpec
from replayssm.traffic import cycle

KIB = 1024


def test_qwen35_4b_by_hand() -> None:
    plan = Plan(preset("qwen3.5-4b"))
    state = 24 * 32 * 128 * 128 * 4
    assert plan.family_counts == {"gdn": 24}
    assert plan.state_bytes_per_request == state == 48 * KIB * KIB
    # k of 16 k-heads, v and u of 32 v-heads in bf16; g and beta in fp32; 17 rows.
    row = 16 * 128 * 2 + 2 * 32 * 128 * 2 + 2 * 32 * 4
    assert plan.ring_bytes_per_request == 24 * 17 * row
    assert plan.read_copy_bytes_per_request == 0
    assert plan.memory_per_request == state + 24 * 17 * row + 16


def test_nano_4b_by_hand() -> None:
    plan = Plan(preset("nemotron-3-nano-4b"))
    assert plan.family_counts == {"mamba2": 21}
    assert plan.state_bytes_per_request == 21 * 96 * 80 * 128 * 4
    # x of 96 heads and B of 8 groups in bf16, dt in fp32.
    row = 96 * 80 * 2 + 8 * 128 * 2 + 96 * 4
    assert plan.ring_bytes_per_request == 21 * 17 * row


def test_gdn_step_bytes_by_hand() -> None:
    plan, batch = Plan((GDNSpec(16, 32, 128, 128),)), 256
    state = 32 * 128 * 128 * 4
    io = (2 * 16 * 128 + 2 * 32 * 128 + 2 * 32) * 2  # q, k; v, o; gates
    params = 2 * 32 * 4
    step = plan.step_bytes(batch)
    assert step.stepwise == params + batch * (2 * state + io + 4)
    row_read = 16 * 128 * 2 + 32 * 128 * 2 + 32 * 4  # k, u, g
    row_replay = 16 * 128 * 2 + 32 * 128 * 2 + 2 * 32 * 4  # k, v, g, beta
    row_append = 16 * 128 * 2 + 2 * 32 * 128 * 2 + 2 * 32 * 4
    # A cycle of 16 steps: 1 to 15 committed rows are read, then 16 are replayed and the state is written.
    mean = state + (sum(range(1, 16)) * row_read + 16 * row_replay + state) / 16
    assert step.replay == round(params + batch * (mean + row_append + io + 16 + 4))
    assert 1.7 < plan.traffic_ratio(batch) < 1.9


def test_mamba2_nvfp4_read_copy_by_hand() -> None:
    plan = Plan((Mamba2Spec(128, 64, 128, 8),), read="nvfp4", checkpoint="fp16")
    head = 64 * 128
    assert plan.state_bytes_per_request == 128 * head * 2
    # half a byte an element, a byte every 16 elements, 4 bytes a head
    assert plan.read_copy_bytes_per_request == 128 * (head // 2 + head // 16 + 4)
    io = (2 * 128 * 64 + 2 * 8 * 128 + 128) * 2
    row = 128 * 64 * 2 + 8 * 128 * 2 + 128 * 4
    copy = plan.read_copy_bytes_per_request
    # 15 steps read the copy; the flush reads and writes the checkpoint and writes the copy.
    mean = (15 * copy + 2 * 128 * head * 2 + copy + (sum(range(1, 16)) + 16) * row) / 16
    assert plan.step_bytes(1).replay == round(3 * 128 * 4 + mean + row + io + 20)


@pytest.mark.parametrize(
    ("read", "nbytes"), [("bf16", 2 * 32 * 64), ("int8", 32 * 64 + 2 * 128 // 2), ("fp8", 32 * 64 + 4 * 32)]
)
def test_read_copy_bytes(read: str, nbytes: int) -> None:
    plan = Plan((GDNSpec(1, 1, 64, 32),), read=read)
    assert plan.read_copy_bytes_per_request == nbytes


def test_kda_ring_keeps_a_decay_for_every_column() -> None:
    plan = Plan((KDASpec(32, 32, 128, 128),), num_draft_tokens=3)
    row = 32 * (3 * 128 * 2 + 128 * 4 + 4)
    assert plan.ring_bytes_per_request == (16 + 4) * row
    assert plan.memory_per_request <= 1.45 * plan.state_bytes_per_request
    assert plan.snapshot_bytes_per_request == 4 * plan.state_bytes_per_request


@pytest.mark.parametrize(
    ("buffer_len", "window", "accepted", "expected"),
    [
        (4, 1, 1, [(1, False), (2, False), (3, False), (4, True)]),
        (1, 1, 1, [(1, True)]),
        (16, 4, 3, [(3, False), (6, False), (9, False), (12, False), (15, True)]),
        (4, 4, 4, [(4, True)]),
    ],
)
def test_cycle(buffer_len: int, window: int, accepted: int, expected: list[tuple[int, bool]]) -> None:
    assert cycle(buffer_len, window, accepted) == expected


def test_every_preset_can_be_planned_and_sharded() -> None:
    for name in replayssm.PRESETS:
        plan = Plan(preset(name))
        assert plan.traffic_ratio(256) > 1.4, name
        half = Plan(tuple(spec.shard(2) for spec in preset(name)))
        assert half.state_bytes_per_request * 2 == plan.state_bytes_per_request


def test_tensor_parallel_sizes() -> None:
    spec = Mamba2Spec(128, 64, 128, 1)
    assert spec.shard(8) == Mamba2Spec(16, 64, 128, 1)  # each rank keeps a copy of the group
    with pytest.raises(ReplayError, match=r"tp is 3; allowed .*: 1, 2, 4, 8, 16"):
        GDNSpec(16, 32, 128, 128).shard(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buffer_len": 0}, "buffer_len is 0"),
        ({"buffer_len": 16.0}, "buffer_len is 16.0"),
        ({"buffer_len": True}, "buffer_len is True"),
        ({"buffer_len": 257}, "buffer_len is 257"),
        ({"num_draft_tokens": -1}, "num_draft_tokens is -1"),
        ({"num_draft_tokens": 16}, "at most buffer_len - 1"),
        ({"checkpoint": "fp64"}, "checkpoint is 'fp64'; allowed: fp32, fp16, bf16, fp8"),
        ({"checkpoint": "nvfp4"}, "checkpoint is 'nvfp4'"),
        ({"read": "int4"}, "read is 'int4'; allowed: none, bf16, int8, fp8, nvfp4"),
        ({"activation": torch.float64}, "activation is torch.float64"),
        ({"device": "gpu"}, "device is 'gpu'"),
        ({"backend": "cuda"}, "backend is 'cuda'; allowed: auto, torch, triton, reference"),
        ({"backend": "triton"}, "TRITON_INTERPRET=1"),
        ({"layers": ()}, "layers is ()"),
        ({"layers": "qwen3.5-4b"}, "layers is 'qwen3.5-4b'"),
        ({"layers": (1,)}, "layers holds 1"),
        ({"layers": (GDNSpec(1, 1, 16, 16),) * 2}, "layer_idx 0 more than once"),
        ({"layers": (GDNSpec(1, 1, 24, 16),), "read": "int8"}, "divisible by 32"),
        ({"spread_flushes": "false"}, "spread_flushes is 'false'"),
        ({"spread_flushes": 1}, "spread_flushes is 1; allowed: None, True, False"),
        ({"read": ((0, "int8"), (0, "bf16"))}, "read is ((0, 'int8'), (0, 'bf16'))"),
        ({"device": "meta"}, "device is 'meta'; allowed: cpu, cuda or cuda:N"),
        ({"device": None}, "device is None"),
        ({"route": "fast"}, "route is 'fast'; allowed: replay, stepwise"),
        ({"route": "stepwise", "num_draft_tokens": 1}, "allowed with drafts: replay"),
        ({"replay": "exact"}, "replay is 'exact'; allowed: auto, serial, chunk"),
        ({"replay": "chunk"}, "replay is 'chunk' with backend 'torch'"),
        ({"replay": "chunk", "device": "cuda", "activation": torch.float32}, "16-bit activations"),
    ],
)
def test_bad_plans_are_refused(options: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    arguments: dict[str, object] = {"layers": (GDNSpec(1, 2, 32, 16),)} | options
    with pytest.raises(ReplayError) as error:
        Plan(**arguments)  # type: ignore[arg-type]
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mamba2Spec(0, 4, 8, 1), "num_heads is 0"),
        (lambda: Mamba2Spec(4, 4, 8, 3), "n_groups is 3; allowed: a divisor of num_heads (4)"),
        (lambda: GDNSpec(2, 3, 8, 8), "num_k_heads is 2; allowed: a divisor of num_v_heads (3)"),
        (lambda: GDNSpec(2, 4, float("nan"), 8), "head_k_dim is nan"),
        (lambda: KDASpec(2, 4, 8, 8), "num_k_heads is 2; allowed for kda"),
        (lambda: KDASpec(2, 2, 8, 8, lower_bound=float("nan")), "lower_bound is nan"),
        (lambda: KDASpec(2, 2, 8, 8, lower_bound=5.0), "lower_bound is 5.0"),
        (lambda: KDASpec(2, 2, 8, 8, lower_bound="-5"), "lower_bound is '-5'"),
        (lambda: GDNSpec(2, 2, 8, 8, use_qk_l2norm="false"), "use_qk_l2norm is 'false'; allowed: True, False"),
    ],
)
def test_bad_layers_are_refused(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ReplayError) as error:
        make()
    assert message in str(error.value)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
def test_a_cache_on_a_gpu_that_is_not_there() -> None:
    plan = Plan((GDNSpec(1, 2, 32, 16),), device="cuda:3")
    with pytest.raises(ReplayError, match=r"device is 'cuda:3'; allowed: cpu \(no CUDA device was found here\)"):
        ReplayCache(plan, 1)


def test_layers_that_a_plan_does_not_have() -> None:
    plan = Plan((GDNSpec(1, 2, 32, 16, layer_idx=4),))
    for ask in (plan.read_format, plan.replay_form):
        with pytest.raises(ReplayError, match="layer_idx is 9; allowed: 4"):
            ask(9)


def test_small_caches_flush_in_lockstep_unless_told_otherwise() -> None:
    plan = Plan((GDNSpec(1, 2, 16, 16),))
    assert [plan.spreads(n) for n in (1, 63, 64, 500)] == [False, False, True, True]
    assert plan.with_options(spread_flushes=True).spreads(1)
    assert not plan.with_options(spread_flushes=False).spreads(500)
    limits = replayssm.ReplayCache(plan, 64).cursors[:, 2]
    assert sorted(limits.tolist()) == sorted(list(range(1, 17)) * 4)


@pytest.mark.parametrize(
    ("spec", "options", "expected"),
    [
        (Mamba2Spec(4, 8, 32, 1), {}, "serial"),
        (Mamba2Spec(4, 8, 32, 1), {"read": "nvfp4", "num_draft_tokens": 3}, "serial"),
        (Mamba2Spec(4, 8, 32, 1), {"checkpoint": "bf16"}, "chunk"),
        (GDNSpec(1, 2, 32, 16), {}, "serial"),
        (GDNSpec(1, 2, 32, 16), {"read": "nvfp4"}, "chunk"),
        (GDNSpec(1, 2, 32, 16), {"num_draft_tokens": 3}, "chunk"),
        (GDNSpec(1, 2, 32, 16), {"num_draft_tokens": 3, "replay": "serial"}, "serial"),
        (GDNSpec(1, 2, 32, 16), {"checkpoint": "fp16", "activation": torch.float32}, "serial"),
        (KDASpec(2, 2, 32, 16), {"checkpoint": "fp8"}, "chunk"),
    ],
)
def test_replay_is_serial_where_bits_are_promised(spec: LayerSpec, options: dict[str, Any], expected: str) -> None:
    assert Plan((spec,), device="cuda", **options).replay_form(0) == expected
    if "replay" not in options:
        assert Plan((spec,), **options).replay_form(0) == "serial"


@pytest.mark.parametrize("name", ["nemotron-3-nano-4b", "qwen3.5-4b", "kimi-linear-48b"])
def test_kernels_of_windows_with_read_copies_are_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from replayssm.ops.registry import read_launch_module, read_window_launch_module

    layers = preset(name)[:1]
    for module in (read_launch_module(layers[0].family), read_window_launch_module(layers[0].family)):
        monkeypatch.setattr(module, "device_arch", lambda device: "sm90")
    (kernel,) = Plan(layers, device="cuda", read="nvfp4", num_draft_tokens=3).kernels(256).values()
    one_token, windows = kernel.split("; windows: ")
    assert "gluon" in one_token and "gluon" in windows
    for buffer_len, backend in ((32, "gluon"), (64, "triton")):
        plan = Plan(layers, device="cuda", read="nvfp4", num_draft_tokens=3, buffer_len=buffer_len)
        assert backend in next(iter(plan.kernels(256).values())).split("; windows: ")[1]
