"""Correctness on the user's own device, driver and shapes: replay and stepwise decoding against float64."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

from replayssm.cache import ReplayCache
from replayssm.check_cases import DTYPES, CheckCase
from replayssm.config import Mamba2Spec
from replayssm.cursors import NUM_FLUSHES, Step, flush_mask
from replayssm.ops.registry import FamilyOps, family_ops
from replayssm.quant import as_indexable, dequantize, quantize
from replayssm.rounding import random_words
from replayssm.workload import op_options, positional, random_inputs, random_parameters

FLUSHES = 4


@dataclass(frozen=True)
class CheckResult:
    """Relative errors against float64 (largest of the outputs; final states), and the verdict.

    Outputs are compared with what follows exactly from the bytes that they are read from, so the error of kernels alone
    shows, not that of the formats; beside them those of stepwise decoding in fp32 from the same bytes. copies_exact:
    every read copy is that of its checkpoint, to the bit.
    """

    case: CheckCase
    output_error: float
    stepwise_output_error: float
    state_error: float
    stepwise_state_error: float
    bit_equal: bool
    copies_exact: bool
    passed: bool


def run_check(case: CheckCase, device: torch.device, *, backend: str = "auto", seed: int = 0) -> CheckResult:
    """Decode requests in every other of shuffled slots, with padding, past four flushes; what is unused holds NaN."""
    run = _Run(case, device, backend, seed)
    for _ in range(FLUSHES * run.plan.buffer_len + 5):
        run.step()
    return run.result()


class _Run:
    """The same tokens through the ring, and by stepwise decoding in the checkpoint's format and in float64.

    `reads` is, in float64, what outputs follow from: the read copy (or checkpoint) of the last flush and the tokens
    that were committed since.
    """

    def __init__(self, case: CheckCase, device: torch.device, backend: str, seed: int) -> None:
        self.plan = case.plan(device, backend)
        self.case, self.device, self.pick = case, device, random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.cache = ReplayCache(self.plan, 2 * case.rows)
        self.parameters = random_parameters(case.spec, self.generator)
        self.owned = self.pick.sample(range(2 * case.rows), case.rows)
        layer = self.cache.layer(0)
        for tensor in layer.tensors():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 85)
        state = torch.randn(case.rows, *case.spec.state_shape, generator=self.generator)
        self.cache.load(self.owned, {0: (state / case.spec.state_shape[2] ** 0.5).to(device)})
        # Stepwise decoding knows neither: its state stays in fp32 and is rounded where the ring was replayed.
        self.rounds_as_flushes_do = case.checkpoint == "fp8" or case.rounding == "stochastic"
        self.stepwise = layer.plain_state() if self.rounds_as_flushes_do else layer.state.clone()
        # In float64 the vectorised ops serve as well as the reference, which takes a row at a time.
        self.exact_ops = family_ops(case.spec.family, "torch", device)
        self.exact = layer.plain_state().double()
        self.reads = self._read_from()
        self.output_error = self.stepwise_output_error = 0.0

    def _read_from(self) -> torch.Tensor:
        """What the next step reads, for every slot."""
        layer = self.cache.layer(0)
        return (layer.plain_state() if layer.read_copy is None else dequantize(layer.read_copy)).double()

    def step(self) -> None:
        """One step of all rows in a new order, with one row of padding and random acceptance."""
        slots = [*self.pick.sample(self.owned, self.case.rows), -1]
        self.pick.shuffle(slots)
        longest = self.plan.max_window_len
        lens = [self.pick.randint(0, longest) if longest > 1 else 1 for _ in slots]
        step = self.cache.begin_step(slots, lens if longest > 1 else 1)
        inputs = random_inputs(self.case.spec, sum(lens), DTYPES[self.case.activation], self.generator)
        out = self._replay(step, inputs)
        self._note_flushes(step)
        accepted = [self.pick.randint(0, n) for n in lens] if longest > 1 else lens
        ops = self.cache.layer(0).ops
        plain = self._stepwise(ops, self.reads.float(), slots, lens, inputs)
        exact = self._stepwise(self.exact_ops, self.reads.clone(), slots, lens, inputs)
        self.output_error = max(self.output_error, _error(out, exact))
        self.stepwise_output_error = max(self.stepwise_output_error, _error(plain, exact))
        kept = [i for r, n in enumerate(accepted) for i in range(sum(lens[:r]), sum(lens[:r]) + n)]
        taken = {name: value[kept] for name, value in inputs.items()}
        self._stepwise(ops, self.stepwise, slots, accepted, taken)
        for state in (self.exact, self.reads):
            self._stepwise(self.exact_ops, state, slots, accepted, taken)
        self.cache.commit(step, accepted if longest > 1 else None)

    def _note_flushes(self, step: Step) -> None:
        """Rows that flushed read from new bytes; a state that is rounded as flushes do is rounded now."""
        rows = step.slot_indices[step.slot_indices >= 0].long()
        lens = step.window_lens[step.slot_indices >= 0]
        flushed = rows[flush_mask(self.cache.cursors[rows], lens, step.buffer_len)]
        self.reads[flushed] = self._read_from()[flushed]
        if self.rounds_as_flushes_do:
            words = None
            if self.cache.seeds is not None:
                counts = self.cache.cursors[flushed, NUM_FLUSHES]
                words = random_words(self.cache.seeds[flushed], counts, self.case.spec.state_shape)
            self.stepwise[flushed] = dequantize(quantize(self.stepwise[flushed], self.case.checkpoint, words=words))

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
            **layer.op_formats(),
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
        activation, fp32 = (torch.finfo(DTYPES[n]).eps for n in (self.case.activation, "fp32"))
        # What either way of decoding may do at all: sums and exponentials in fp32, and the formats' own roundings.
        state_limit, output_limit = 64 * fp32 + 8 * self._checkpoint_eps(), 64 * fp32 + 4 * activation
        # Outputs may round a few times more than stepwise decoding's; u passes the ring in the activation's dtype.
        outputs_pass = self.output_error <= min(output_limit, 4 * self.stepwise_output_error + 4 * activation)
        # Mamba-2's updates need no sum over the state, so nothing may differ; a 16-bit checkpoint rounds less often.
        serial = self.cache.layer(0).replay_form == "serial"
        must_be_equal = serial and self.stepwise.dtype == torch.float32 and isinstance(self.case.spec, Mamba2Spec)
        states_pass = bit_equal if must_be_equal else state_error <= 2 * stepwise_error + 1e-12
        sane = self.stepwise_output_error <= output_limit and stepwise_error <= state_limit
        errors = (self.output_error, self.stepwise_output_error, state_error, stepwise_error)
        exact_copies = self._copies_are_exact()
        passed = sane and outputs_pass and states_pass and exact_copies
        return CheckResult(self.case, *errors, bit_equal, exact_copies, passed)

    def _checkpoint_eps(self) -> float:
        dtypes = {"fp32": 0.0, "fp8": torch.finfo(torch.float8_e4m3fn).eps}
        return dtypes[name] if (name := self.case.checkpoint) in dtypes else torch.finfo(DTYPES[name]).eps

    def _copies_are_exact(self) -> bool:
        layer, slots = self.cache.layer(0), torch.tensor(self.owned, device=self.device)
        if layer.read_copy is None:
            return True
        got = layer.read_copy.gather(slots).tensors()
        expected = quantize(layer.stored.checkpoint(slots), layer.read_copy.format).tensors()
        return all(torch.equal(as_indexable(got[name]), as_indexable(t)) for name, t in expected.items())


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
