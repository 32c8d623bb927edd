"""A cache of three small layers beside a model of what it must hold: every request decoded token by token."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from families import Case, cast, random_params, random_tokens, relative_error, run_stepwise

from replayssm import GDNSpec, KDASpec, Mamba2Spec, Plan, ReplayCache, Step, delta_decode, mamba2_decode

LAYERS = (
    Case("mamba2", Mamba2Spec(num_heads=4, head_dim=3, d_state=6, n_groups=2, layer_idx=0)),
    Case("gdn", GDNSpec(num_k_heads=1, num_v_heads=2, head_k_dim=6, head_v_dim=5, layer_idx=2)),
    Case("kda", KDASpec(num_k_heads=2, num_v_heads=2, head_k_dim=5, head_v_dim=4, lower_bound=-5.0, layer_idx=5)),
)
EPS = torch.finfo(torch.float32).eps


def tree_path(parents: list[int], token: int) -> list[int]:
    """The path from the root to `token`, itself included."""
    path: list[int] = []
    while token >= 0:
        path.insert(0, token)
        token = parents[token]
    return path


def small_plan(**options: Any) -> Plan:
    defaults = {"buffer_len": 6, "num_draft_tokens": 3, "activation": torch.float32}
    return Plan(tuple(case.spec for case in LAYERS), **(defaults | options))


@dataclass
class Requests:
    """`states[slot][layer]` is the fp32 state that stepwise decoding holds; `exact` the same in float64."""

    cache: ReplayCache
    seed: int = 0
    states: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    exact: dict[int, list[torch.Tensor]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.generator = torch.Generator().manual_seed(self.seed)
        self.params = [random_params(case, self.generator) for case in LAYERS]

    def load(self, slots: list[int]) -> None:
        loaded = [torch.randn(len(slots), *case.spec.state_shape, generator=self.generator) for case in LAYERS]
        self.cache.load(slots, {case.spec.layer_idx: s for case, s in zip(LAYERS, loaded, strict=True)})
        for i, slot in enumerate(slots):
            self.states[slot] = [s[i].clone() for s in loaded]
            self.exact[slot] = [s[i].double() for s in loaded]

    @property
    def requests(self) -> list[int]:
        """Slots that hold a request."""
        return sorted(self.states)

    def finish(self, slot: int) -> None:
        del self.states[slot], self.exact[slot]

    def flush(self, slots: list[int] | None) -> None:
        self.cache.flush(slots)

    def copy(self, src: int, dst: int) -> None:
        self.cache.copy([src], [dst])
        self._copy_states(src, dst)

    def move(self, slot: int, back: int) -> None:
        """Preempt the request and resume it from its materialised state, in the slot `back`."""
        saved = {case.spec.layer_idx: self.cache.materialize(case.spec.layer_idx, [slot]) for case in LAYERS}
        self._copy_states(slot, back)
        if back != slot:
            self.finish(slot)
        self.cache.load([back], saved)

    def _copy_states(self, src: int, dst: int) -> None:
        self.states[dst] = [s.clone() for s in self.states[src]]
        self.exact[dst] = [s.clone() for s in self.exact[src]]

    def step(
        self,
        slots: list[int],
        lens: list[int] | None,
        accepted: list[int] | None,
        *,
        parents: list[list[int]] | None = None,
        paths: list[list[int]] | None = None,
        check_outputs: bool = True,
        **options: Any,
    ) -> None:
        """One step of all layers; checks its outputs, commits, and advances the model by the accepted tokens.

        parents: windows are trees, a list of parents a row, and `paths` the accepted path of each row.
        """
        counts = [1] * len(slots) if lens is None else lens
        if parents is not None:
            options["parents"] = torch.tensor([p for row in parents for p in row], dtype=torch.int32)
        step = self.cache.begin_step(slots, 1 if lens is None else lens, **options)
        tokens = [random_tokens(case, sum(counts), self.generator) for case in LAYERS]
        outputs = [self.decode(i, step, tokens[i]) for i in range(len(LAYERS))]
        self.cache.commit(step, accepted, accepted_paths=paths)
        kept = paths or [list(range(n)) for n in (counts if accepted is None else accepted)]
        starts = [sum(counts[:r]) for r in range(len(counts))]
        chosen = [[starts[r] + j for j in path] for r, path in enumerate(kept)]
        for i, case in enumerate(LAYERS):
            if check_outputs:
                self._check_outputs(i, case, outputs[i], tokens[i], slots, counts, parents)
            self._advance(i, case, tokens[i], slots, chosen)

    def decode(self, i: int, step: Step, tokens: dict[str, Any], cache: ReplayCache | None = None) -> torch.Tensor:
        """Outputs of layer i, through `cache` (None: this model's own)."""
        layer, inputs = (
            (cache or self.cache).layer(LAYERS[i].spec.layer_idx),
            cast(tokens | self.params[i], torch.float32),
        )
        if LAYERS[i].prefix == "mamba2":
            return mamba2_decode(layer, step, **inputs)
        return delta_decode(layer, step, **inputs)

    def _rows(self, i: int, slots: list[int], store: dict[int, list[torch.Tensor]]) -> torch.Tensor:
        zero = torch.zeros(LAYERS[i].spec.state_shape, dtype=torch.float64)
        dtype = torch.float64 if store is self.exact else torch.float32
        return torch.stack([store[s][i] if s in store else zero for s in slots]).to(dtype)

    def _run(
        self, i: int, case: Case, tokens: dict[str, Any], slots: list[int], chosen: list[list[int]], exact: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(outputs, states after) of stepwise decoding of the tokens `chosen` for each row."""
        index = [t for row in chosen for t in row]
        dtype = torch.float64 if exact else torch.float32
        taken = {n: None if v is None else v[index] for n, v in tokens.items()} | self.params[i]
        states = self._rows(i, slots, self.exact if exact else self.states)
        rows = torch.tensor([r if s in self.states else -1 for r, s in enumerate(slots)], dtype=torch.int32)
        loc = torch.tensor([0, *map(len, chosen)]).cumsum(0).int()
        backend = "reference" if exact else "torch"
        return run_stepwise(case, backend, cast(taken, dtype, dtype), states, rows, loc), states

    def _check_outputs(
        self,
        i: int,
        case: Case,
        out: torch.Tensor,
        tokens: dict[str, Any],
        slots: list[int],
        counts: list[int],
        parents: list[list[int]] | None,
    ) -> None:
        if len(out) == 0:
            return
        starts = [sum(counts[:r]) for r in range(len(counts))]
        last: Any = slice(None)
        if parents is None:
            chosen = [[first + j for j in range(n)] for first, n in zip(starts, counts, strict=True)]
        else:
            # Every token is the end of a chain of its own: the path to it.
            slots = [slot for slot, n in zip(slots, counts, strict=True) for _ in range(n)]
            paths = [tree_path(parents[r], t) for r, n in enumerate(counts) for t in range(n)]
            firsts = [first for first, n in zip(starts, counts, strict=True) for _ in range(n)]
            chosen = [[first + j for j in path] for first, path in zip(firsts, paths, strict=True)]
            last = torch.tensor([len(path) for path in paths], dtype=torch.int64).cumsum(0) - 1
        expected, plain = (self._run(i, case, tokens, slots, chosen, exact)[0][last] for exact in (True, False))
        assert torch.isfinite(out).all()
        # Four times ordinary decoding's own error, plus a few roundings of the largest output.
        allowed = 4 * relative_error(plain, expected) + 32 * EPS
        assert relative_error(out, expected) <= allowed

    def _advance(self, i: int, case: Case, tokens: dict[str, Any], slots: list[int], chosen: list[list[int]]) -> None:
        for exact, store in ((True, self.exact), (False, self.states)):
            _, after = self._run(i, case, tokens, slots, chosen, exact)
            for row, slot in enumerate(slots):
                if slot in store:
                    store[slot][i] = after[row]

    def check(self) -> None:
        """Every request's materialised state equals stepwise decoding's to the last bit."""
        slots = sorted(self.states)
        for i, case in enumerate(LAYERS):
            if slots:
                got = self.cache.materialize(case.spec.layer_idx, slots)
                assert torch.equal(got, self._rows(i, slots, self.states)), case
