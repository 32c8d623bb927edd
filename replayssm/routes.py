"""What runs a plan: whether its backend can, how its flushes replay, which kernels a batch gets."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from replayssm.checks import ReplayError
from replayssm.config import LayerSpec
from replayssm.ops.registry import launch_module, read_launch_module, read_window_launch_module

if TYPE_CHECKING:
    from replayssm.plan import Plan


def check_runnable(plan: Plan) -> None:
    """Raise unless the plan's backend has kernels for it; torch has them all."""
    if plan.backend != "triton":
        return
    if plan.route == "stepwise" and plan.checkpoint == "fp8":
        raise ReplayError("route is 'stepwise' with checkpoint 'fp8'; allowed on a GPU: route replay")
    for spec in plan.layers:
        K = spec.state_shape[2]
        if plan.rounding == "stochastic" and K % 4 != 0:  # random words come four columns at a time
            raise ReplayError(f"rounding is 'stochastic' with K = {K}; allowed on a GPU: K divisible by 4")


def replay_form(plan: Plan, spec: LayerSpec) -> str:
    """How a layer's flushes replay: serial where the states of stepwise decoding are promised bit for bit."""
    if plan.replay != "auto":
        return plan.replay
    if plan.backend != "triton" or plan.activation == torch.float32:
        return "serial"
    rounded = plan.checkpoint != "fp32"
    approximate = plan.num_draft_tokens > 0 or plan.read_format(spec.layer_idx) != "none"
    return "chunk" if rounded or (approximate and spec.family != "mamba2") else "serial"


def is_special(checkpoint: str, read: str, rounding: str) -> bool:
    """Whether a GPU needs other kernels than those of plain checkpoints."""
    return read != "none" or checkpoint == "fp8" or rounding == "stochastic"


def kernels(plan: Plan, batch: int) -> dict[str, str]:
    """What a step of `batch` rows runs, by layer family, state shape and (where there is one) read format."""
    chosen = {}
    for spec in plan.layers:
        read = plan.read_format(spec.layer_idx)
        name = f"{spec.family} {'x'.join(map(str, spec.state_shape))}" + ("" if read == "none" else f", {read}")
        if name in chosen:
            continue
        if plan.route == "stepwise":
            chosen[name] = "stepwise"
        elif plan.backend != "triton":
            chosen[name] = plan.backend
        else:
            chosen[name] = _kernel(plan, spec, read, batch)
    return chosen


def _kernel(plan: Plan, spec: LayerSpec, read: str, batch: int) -> str:
    device = torch.device(plan.device)
    if plan.rounding == "stochastic":
        return "triton"  # only the portable kernels round stochastically
    if is_special(plan.checkpoint, read, plan.rounding):
        options = {"checkpoint": plan.checkpoint, "read": read, "batch": batch, "device": device}
        one_token = str(read_launch_module(spec.family).route(spec, ring_len=plan.ring_len, **options))
        if not plan.num_draft_tokens:
            return one_token
        windows = read_window_launch_module(spec.family)
        options |= {"buffer_len": plan.buffer_len, "max_window_len": plan.max_window_len}
        return f"{one_token}; windows: {windows.window_route(spec, **options)}"
    launch = launch_module(spec.family)
    one_token = str(launch.route(plan.checkpoint_dtype, batch, spec, device, plan.ring_len, replay_form(plan, spec)))
    if not plan.num_draft_tokens or not hasattr(launch, "window_route"):
        return one_token
    dims = (plan.buffer_len, plan.max_window_len, plan.activation)
    return f"{one_token}; windows: {launch.window_route(plan.checkpoint_dtype, batch, spec, device, *dims)}"
