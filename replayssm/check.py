"""Correctness on the user's own device, driver and shapes: replay and stepwise decoding against float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from replayssm.cache import ReplayCache
from replayssm.config import GDNSpec, KDASpec, LayerSpec, Mamba2Spec
from replayssm.cursors import Step
from replayssm.ops.registry import FamilyOps, family_ops
from replayssm.plan import Plan
from replayssm.workload import op_options, positional, random_inputs, random_parameters

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
FLUSHES = 4


@dataclass(frozen=True)
class CheckCase:
    """One layer, decoded in one mode with `rows` requests."""

    spec: LayerSpec
    activation: str
    checkpoint: str
    mode: str
    rows: int = 3


@dataclass(frozen=True)
class CheckResult:
    """Relative errors against float64 (largest of the outputs; final states), and the verdict."""

    case: CheckCase
    output_error: float
    stepwise_output_error: float
    state_error: float
    stepwise_state_error: float
    bit_equal: bool
    passed: bool


def check_cases(
    shapes: Sequence[LayerSpec] = SHAPES, modes: Sequence[str] = tuple(MODES), batches: Sequence[int] = (3,)
) -> list[CheckCase]:
    """Every shape in every mode: each activation with an fp32 checkpoint, and 16-bit checkpoints under bf16."""
    pairs = [(activation, "fp32") for activation in DTYPES] + [("bf16", "bf16"), ("bf16", "fp16")]
    return [
        CheckCase(replace(spec, layer_idx=0), activation, checkpoint, mode, rows)
        for spec in shapes
        for mode in modes
        for activation, checkpoint in pairs
        for rows in batches
    ]


def shrink(spec: LayerSpec, groups: int = 2) -> LayerSpec:
    """The layer with at most `groups` groups (Mamba-2) or k-heads, as many heads in each as before."""
    if isinstance(spec, Mamba2Spec):
        kept = min(groups, spec.n_groups)
        return replace(spec, num_heads=spec.num_heads // spec.n_groups * kept, n_groups=kept)
    kept = min(groups, spec.num_k_heads)
    return replace(spec, num_v_heads=spec.num_v_heads // spec.num_k_heads * kept, num_k_heads=kept)


def run_check(case: CheckCase, device: torch.device, *, backend: str = "auto", seed: int = 0) -> CheckResult:
    """Decode requests in every other of shuffled slots, with padding, past four flushes; what is unused holds NaN."""
    run = _Run(case, device, backend, seed)
    for _ in range(FLUSHES * run.plan.buffer_len + 5):
        run.step()
    return run.result()


class _Run:
    """The same tokens through the ring, by the stepwise op in the checkpoint's dtype, and in float64 on the CPU."""

    def __init__(self, case: CheckCase, device: torch.device, backend: str, seed: int) -> None:
        self.plan = Plan(
            (case.spec,),
            num_draft_tokens=MODES[case.mode],
            checkpoint=case.checkpoint,
            activation=DTYPES[case.activation],
            device=device,
            backend=backend,
            route="replay",  # small batches too are to go through the ring here
        )
        self.case, self.device, self.pick = case, device, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = ReplayCache(self.plan, 2 * case.rows)
        self.parameters = random_parameters(case.spec, self.generator)
        self.owned = self.pick.sample(range(2 * case.rows), case.rows)
        layer = self.cache.layer(0)
        for tensor in layer.tensors():
            tensor.fill_(float("nan"))
        state = (
            torch.randn(case.rows, *case.spec.state_shape, generator=self.generator) / case.spec.state_shape[2] ** 0.5
        )
        self.cache.load(self.owned, {0: state.to(device)})
        self.stepwise = layer.state.clone()
        # In float64 the vectorised ops serve as well as the reference, which takes a row at a time.
        self.exact_ops = family_ops(case.spec.family, "torch", device)
        self.exact = layer.state.double()
        self.output_error = self.stepwise_output_error = 0.0

    def step(self) -> None:
        """One step of all rows in a new order, with one row of padding and random acceptance."""
        slots = [*self.pick.sample(self.owned, self.case.rows), -1]
        self.pick.shuffle(slots)
        longest = self.plan.max_window_len
        lens = [self.pick.randint(0, longest) if longest > 1 else 1 for _ in slots]
        step = self.cache.begin_step(slots, lens if longest > 1 else 1)
        inputs = random_inputs(self.case.spec, sum(lens), DTYPES[self.case.activation], self.generator)
        out = self._replay(step, inputs)
        accepted = [self.pick.randint(0, n) for n in lens] if longest > 1 else lens
        plain = self._stepwise(self.cache.layer(0).ops, self.stepwise.clone(), slots, lens, inputs)
        exact = self._stepwise(self.exact_ops, self.exact.clone(), slots, lens, inputs)
        self.output_error = max(self.output_error, _error(out, exact))
        self.stepwise_output_error = max(self.stepwise_output_error, _error(plain, exact))
        kept = [i for r, n in enumerate(accepted) for i in range(sum(lens[:r]), sum(lens[:r]) + n)]
        taken = {name: value[kept] for name, value in inputs.items()}
        self._stepwise(self.cache.layer(0).ops, self.stepwise, slots, accepted, taken)
        self._stepwise(self.exact_ops, self.exact, slots, accepted, taken)
        self.cache.commit(step, accepted if longest > 1 else None)

    def _replay(self, step: Step, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        layer, spec = self.cache.layer(0), self.case.spec
        on_device = {name: _move(value, self.device) for name, value in (inputs | self.parameters).items()}
        layer.A = on_device.get("A")
        out = self._poisoned(len(next(iter(inputs.values()))), self.device, DTYPES[self.case.activation])
        layer.ops.step(
            *(*positional(spec, on_device), layer.state, *layer.ring.values()),
            *(self.cache.cursors, step.slot_indices, step.query_start_loc, out),
            buffer_len=step.buffer_len,
            pad_slot_id=-1,
            max_window_len=step.max_window_len,
            **op_options(spec),
        )
        return out

    def _stepwise(
        self, ops: FamilyOps, state: torch.Tensor, slots: list[int], lens: list[int], inputs: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """Outputs of the windows' tokens, decoded one at a time."""
        exact, device = state.dtype == torch.float64, self.device
        every = {name: _move(value, device) for name, value in (inputs | self.parameters).items()}
        if exact:
            every = {name: value.double() for name, value in every.items()}
        out = self._poisoned(sum(lens), device, torch.float64 if exact else DTYPES[self.case.activation])
        for i in range(max(lens, default=0)):
            rows = [r for r, n in enumerate(lens) if n > i]
            at = torch.tensor([sum(lens[:r]) + i for r in rows], device=device)
            where = torch.tensor([slots[r] for r in rows], dtype=torch.int32, device=device)
            whole = len(at) == len(out)  # one token a row: the strided inputs go in as they are
            tokens = every if whole else {n: v if n in self.parameters else v[at] for n, v in every.items()}
            mine = self._poisoned(len(at), device, out.dtype)
            options: dict[str, Any] = {"pad_slot_id": -1, "max_window_len": 1, **op_options(self.case.spec)}
            ops.stepwise(*positional(self.case.spec, tokens), state, where, None, mine, **options)
            out[at] = mine
        return out

    def _poisoned(self, tokens: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        return torch.full((tokens, *self.case.spec.state_shape[:2]), float("nan"), dtype=dtype, device=device)

    def result(self) -> CheckResult:
        """Compare the materialized states, and judge."""
        got = self.cache.materialize(0, self.owned)
        stepwise, exact = self.stepwise[self.owned].float(), self.exact[self.owned]
        state_error, stepwise_error = _error(got, exact), _error(stepwise, exact)
        bit_equal = torch.equal(got, stepwise)
        activation, checkpoint, fp32 = (
            torch.finfo(DTYPES[n]).eps for n in (self.case.activation, self.case.checkpoint, "fp32")
        )
        # What either way of decoding may do at all: sums and exponentials in fp32, and the formats' own roundings.
        state_limit = 64 * fp32 + (8 * checkpoint if self.case.checkpoint != "fp32" else 0)
        output_limit = state_limit + 4 * activation
        # Outputs may round a few times more than stepwise decoding's; u passes the ring in the activation's dtype.
        outputs_pass = self.output_error <= min(output_limit, 4 * self.stepwise_output_error + 4 * activation)
        # Mamba-2's updates need no sum over the state, so nothing may differ; a 16-bit checkpoint rounds less often.
        must_be_equal = self.case.checkpoint == "fp32" and isinstance(self.case.spec, Mamba2Spec)
        states_pass = bit_equal if must_be_equal else state_error <= 2 * stepwise_error + 1e-12
        sane = self.stepwise_output_error <= output_limit and stepwise_error <= state_limit
        errors = (self.output_error, self.stepwise_output_error, state_error, stepwise_error)
        return CheckResult(self.case, *errors, bit_equal, sane and outputs_pass and states_pass)


def _move(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """To the device with its strides, so that kernels see views of packed tensors."""
    if tensor.is_contiguous() or device.type == "cpu":
        return tensor.to(device)
    assert tensor._base is not None
    return tensor._base.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def _error(value: torch.Tensor, exact: torch.Tensor) -> float:
    if not bool(torch.isfinite(value).all()):
        return float("inf")
    exact = exact.double()
    return ((value.double() - exact).norm() / exact.norm().clamp(min=1e-30)).item() if exact.numel() else 0.0
