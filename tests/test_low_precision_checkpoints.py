"""Checkpoints of 16 and 8 bits: rounded once a window, to the bit; stochastic rounding, repeatable by seed."""

from __future__ import annotations

import pytest
import torch
from families import cast, random_tokens, run_stepwise
from formats_model import LAYERS, Pair, decode, fill, formats_plan, same

from replayssm import ReplayCache, ReplayError
from replayssm.quant import QuantizedState, dequantize, quantize
from replayssm.rounding import random_words

SLOTS = [3, 0]
ROUNDED = [
    ("fp16", "nearest"),
    ("fp16", "stochastic"),
    ("bf16", "stochastic"),
    ("fp8", "nearest"),
    ("fp8", "stochastic"),
]


def new_cache(checkpoint: str, rounding: str, **options: object) -> ReplayCache:
    plan = formats_plan(checkpoint=checkpoint, rounding=rounding, num_draft_tokens=0, **options)
    cache = ReplayCache(plan, 4)
    for case in LAYERS:
        for tensor in cache.layer(case.spec.layer_idx).tensors():
            fill(tensor)
    return cache


def loaded(seed: int) -> dict[int, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {case.spec.layer_idx: torch.randn(2, *case.spec.state_shape, generator=generator) for case in LAYERS}


@pytest.mark.parametrize("read", ["none", "int8"])
@pytest.mark.parametrize(("checkpoint", "rounding"), ROUNDED)
@pytest.mark.parametrize("by_hand", [False, True], ids=["steps", "flush"])
def test_a_window_is_rounded_once(checkpoint: str, rounding: str, read: str, by_hand: bool) -> None:
    """Against stepwise fp32 decoding that is rounded where the ring is full; `flush` rounds as a step does."""
    cache = new_cache(checkpoint, rounding, read=read, spread_flushes=False)
    states = loaded(1)
    cache.load(SLOTS, states)
    pair = Pair(formats_plan())
    expected = {idx: quantize(state, checkpoint) for idx, state in states.items()}
    plain = {idx: dequantize(q) for idx, q in expected.items()}
    flushes = 0
    for t in range(4 * 6 + 1):
        if t and t % 6 == 0:
            if by_hand:
                cache.flush(SLOTS)
            for case in LAYERS:
                idx, words = case.spec.layer_idx, None
                if rounding == "stochastic":
                    count = torch.full((2,), flushes)
                    words = random_words(cache.seeds[SLOTS], count, case.spec.state_shape, stream=idx)
                expected[idx] = quantize(plain[idx], checkpoint, words=words)
                plain[idx] = dequantize(expected[idx])
            flushes += 1
        step = cache.begin_step(SLOTS)
        for i, case in enumerate(LAYERS):
            inputs = cast(random_tokens(case, 2, pair.generator) | pair.params[i], torch.float32)
            layer = cache.layer(case.spec.layer_idx)
            decode(case, layer, step, inputs)
            state = QuantizedState(checkpoint, layer.state, layer.state_scales).gather(torch.tensor(SLOTS))
            for name, tensor in expected[case.spec.layer_idx].tensors().items():
                assert same(state.tensors()[name], tensor), (case, t, name)
            run_stepwise(case, "torch", inputs, plain[case.spec.layer_idx], torch.arange(2).int())
        cache.commit(step)
    assert cache.cursors[SLOTS, 3].tolist() == [4, 4]
    for idx, state in plain.items():
        assert torch.equal(cache.materialize(idx, SLOTS), state)
        assert torch.equal(cache.materialize(idx, [SLOTS[1]] * 2, [0, 1])[0], dequantize(expected[idx])[1])


def run(cache: ReplayCache, slots: list[int], steps: int) -> dict[int, torch.Tensor]:
    """States after the same tokens; both rows get the same ones."""
    pair = Pair(formats_plan())
    for _ in range(steps):
        step = cache.begin_step(slots)
        for i, case in enumerate(LAYERS):
            tokens = random_tokens(case, 1, pair.generator)
            doubled = {n: None if v is None else v.expand(2, *v.shape[1:]) for n, v in tokens.items()}
            inputs = cast(doubled | pair.params[i], torch.float32)
            decode(case, cache.layer(case.spec.layer_idx), step, inputs)
        cache.commit(step)
    return {case.spec.layer_idx: cache.materialize(case.spec.layer_idx, slots) for case in LAYERS}


def twice(states: dict[int, torch.Tensor]) -> dict[int, torch.Tensor]:
    return {idx: state[:1].expand(2, *state.shape[1:]) for idx, state in states.items()}


def test_seeds_make_results_repeatable_and_different() -> None:
    runs = []
    for slots, options, seeds in (
        (SLOTS, {"seed": 1}, [7, 8]),
        ([1, 2], {"seed": 2}, [7, 8]),
        (SLOTS, {"seed": 1}, None),
        (SLOTS, {"seed": 1}, None),
        (SLOTS, {"seed": 2}, None),
    ):
        cache = new_cache("bf16", "stochastic", spread_flushes=False, **options)
        cache.load(slots, twice(loaded(1)), seeds=seeds)
        runs.append(run(cache, slots, 13))
    given, elsewhere, first, same_seed, other = runs
    for idx in given:
        assert torch.equal(given[idx], elsewhere[idx])  # whatever the slot
        assert torch.equal(first[idx], same_seed[idx])
        assert not torch.equal(first[idx], other[idx])
        assert not torch.equal(given[idx][0], given[idx][1])


def test_load_reset_and_copy_treat_seeds() -> None:
    cache = new_cache("fp16", "stochastic")
    seen = [cache.seeds.tolist()]
    for _ in range(3):
        cache.reset([0, 1])
        seen.append(cache.seeds.tolist())
    assert len({s for seeds in seen for s in seeds[:2]}) == 8
    assert all(seeds[2:] == seen[0][2:] for seeds in seen)
    cache.copy([0], [2])
    assert cache.seeds[2] == cache.seeds[0]
    cache.reset([0, 2])
    assert cache.seeds[2] != cache.seeds[0]
    cache.reset([3, 1], seeds=torch.tensor([5, -6]))
    assert cache.seeds[[3, 1]].tolist() == [5, -6]
    assert cache.nbytes == 4 * cache.plan.memory_per_request


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounding": "up"}, "rounding is 'up'; allowed: nearest, stochastic"),
        ({"rounding": "stochastic"}, "rounding is 'stochastic' with checkpoint 'fp32'"),
        (
            {"rounding": "stochastic", "checkpoint": "bf16", "route": "stepwise"},
            "route 'stepwise'; allowed: route replay",
        ),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"read": "bf16", "route": "stepwise"}, "route is 'stepwise' with read 'bf16'; allowed with it: read 'none'"),
        ({"read": {0: "bf16"}}, "allowed: a format, or a mapping from every layer_idx [0, 2, 5] to one"),
        ({"read": {0: "bf16", 2: "fp4", 5: "none"}}, "read[2] is 'fp4'; allowed: none, bf16, int8, fp8, nvfp4"),
        ({"read": None}, "read is None"),
        ({"read": ("bf16", "int8")}, "read is ('bf16', 'int8')"),
    ],
)
def test_bad_options(options: dict, message: str) -> None:
    with pytest.raises(ReplayError) as error:
        formats_plan(num_draft_tokens=0, **options)
    assert message in str(error.value)


def test_bad_seeds_leave_the_cache_as_it_was() -> None:
    cache, plain = new_cache("bf16", "stochastic"), new_cache("bf16", "nearest")
    cache.load(SLOTS, loaded(1))
    before = [t.clone() for t in (cache.seeds, cache.layer(0).state)]
    for seeds in ([1], [1, 2**63], [1, 0.5], torch.zeros(2, dtype=torch.int32)):
        with pytest.raises(ReplayError, match="seeds"):
            cache.load(SLOTS, loaded(2), seeds=seeds)
    with pytest.raises(ReplayError, match="seeds is 'given'; allowed: None with rounding 'nearest'"):
        plain.reset([0], seeds=[1])
    for tensor, old in zip((cache.seeds, cache.layer(0).state), before, strict=True):
        assert same(tensor, old)


def test_equal_choices_are_one_plan() -> None:
    assert formats_plan(read={5: "int8", 0: "int8", 2: "int8"}) == formats_plan(read="int8")
    mixed = formats_plan(read={5: "int8", 0: "none", 2: "fp8"})
    assert mixed == formats_plan(read=mixed.read) == formats_plan(read={0: "none", 2: "fp8", 5: "int8"})
    assert hash(mixed) == hash(mixed.with_options())
    assert mixed.read_name == "fp8 in 1, int8 in 1, none in 1 layers"
