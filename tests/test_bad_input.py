"""Wrong calls: each gives one clear error and leaves the cache as it was, and usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import NAN, cast, random_tokens
from requests_model import LAYERS, Requests, small_plan

from replayssm import ReplayCache, ReplayError, delta_decode, mamba2_decode
from replayssm.layer import layer_shapes

MAMBA2, GDN, KDA = LAYERS
Call = Callable[[ReplayCache], Any]


def decode(family: int, slots: list[int] | None = None, **changes: Any) -> Call:
    """A decode call of two rows with some arguments changed; a callable change is applied to the right value."""

    def call(cache: ReplayCache) -> None:
        case, generator = LAYERS[family], torch.Generator().manual_seed(0)
        inputs = cast(random_tokens(case, 2, generator), torch.float32)
        if case.prefix == "mamba2":
            inputs |= {"A": -torch.ones(4), "D": None, "dt_bias": None}
        else:
            inputs |= {"A_log": torch.ones(2), "dt_bias": torch.ones(2, 5) if family == 2 else torch.ones(2)}
        inputs |= {n: c(inputs[n]) if callable(c) else c for n, c in changes.items()}
        step = cache.begin_step([0, 2] if slots is None else slots)
        (mamba2_decode if case.prefix == "mamba2" else delta_decode)(cache.layer(case.spec.layer_idx), step, **inputs)

    return call


def wrong_layer(cache: ReplayCache) -> None:
    step = cache.begin_step([0])
    one = torch.ones(1, 4, 3)
    mamba2_decode(cache.layer(2), step, one, one[..., 0], -torch.ones(4), one, one)


def commit(accepted: Any) -> Call:
    return lambda cache: cache.commit(cache.begin_step([0, 2], [2, 3]), accepted)


def load(slots: Any, change: Callable[[dict], Any] = lambda s: s) -> Call:
    def call(cache: ReplayCache) -> None:
        states = {case.spec.layer_idx: torch.ones(len(slots), *case.spec.state_shape) for case in LAYERS}
        change(states)
        cache.load(slots, states)

    return call


def starts(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def two_rows_of_views(cache: ReplayCache) -> None:
    """An engine's tensors, two slots of which share their memory."""
    shared = {
        case.spec.layer_idx: {
            name: torch.zeros(1, *shape, dtype=dtype).expand(2, *shape)
            for name, (shape, dtype) in layer_shapes(case.spec, cache.plan).items()
        }
        for case in LAYERS
    }
    ReplayCache(cache.plan, 2, layers=shared)


def other_cache(cache: ReplayCache) -> None:
    cache.commit(ReplayCache(cache.plan, 4).begin_step([0]))


META = torch.zeros(1, dtype=torch.int64, device="meta")
WRONG: list[tuple[str, Call, str]] = [
    ("slot too high", lambda c: c.begin_step([0, 4]), "slot_indices[1] is 4; allowed: 0 to 3, or -1 for padding"),
    ("slot negative", lambda c: c.begin_step([-2]), "slot_indices[0] is -2"),
    ("slot twice", lambda c: c.begin_step([2, 2]), "every slot once"),
    ("slots as floats", lambda c: c.begin_step([0.0]), "slot_indices is [0.0]; allowed: integers"),
    (
        "a slot of 70 bits",
        lambda c: c.begin_step([2**70]),
        "slot_indices is [1180591620717411303424]; allowed: integers",
    ),
    ("slots as text", lambda c: c.begin_step("01"), "slot_indices is '01'"),
    ("slots as bool", lambda c: c.begin_step([True]), "slot_indices is [True]"),
    ("slots as float tensor", lambda c: c.begin_step(torch.zeros(2)), "a 1-D int32 or int64 tensor"),
    ("slots as matrix", lambda c: c.begin_step(torch.zeros(2, 2, dtype=torch.int32)), "1-D"),
    ("window too long", lambda c: c.begin_step([0], 5), "window_lens is 5; allowed: an integer from 1 to 4"),
    ("window of zero", lambda c: c.begin_step([0], 0), "window_lens is 0"),
    ("one window negative", lambda c: c.begin_step([0, 2], [1, -1]), "window_lens[1] is -1"),
    ("windows as a float", lambda c: c.begin_step([0], 1.0), "window_lens is 1.0; allowed: an integer, or one a row"),
    ("windows as nothing", lambda c: c.begin_step([0], None), "window_lens is None"),
    ("windows as text", lambda c: c.begin_step([0], "1"), "window_lens is '1'"),
    ("windows as a tensor", lambda c: c.begin_step([0], torch.ones(1)), "window_lens is tensor([1.])"),
    (
        "windows given twice",
        lambda c: c.begin_step([0], 2, query_start_loc=starts(0, 1), max_window_len=1),
        "window_lens is 2; allowed: nothing beside query_start_loc",
    ),
    ("max_window_len alone", lambda c: c.begin_step([0], max_window_len=2), "max_window_len is 2; allowed: None"),
    ("windows missing", lambda c: c.begin_step([0, 2], [1]), "one a row (2)"),
    ("window longer than a lower buffer_len", lambda c: c.begin_step([0], 3, buffer_len=2), "from 1 to 2"),
    (
        "buffer_len too high",
        lambda c: c.begin_step([0], buffer_len=7),
        "buffer_len is 7; allowed: an integer from 1 to 6",
    ),
    ("buffer_len zero", lambda c: c.begin_step([0], buffer_len=0), "buffer_len is 0"),
    (
        "query_start_loc too short",
        lambda c: c.begin_step([0, 2], query_start_loc=starts(0, 1), max_window_len=2),
        "query_start_loc.shape is [2]; allowed: [3]",
    ),
    (
        "query_start_loc of int64",
        lambda c: c.begin_step([0], query_start_loc=starts(0, 1).long(), max_window_len=1),
        "query_start_loc.dtype is torch.int64",
    ),
    (
        "query_start_loc falls",
        lambda c: c.begin_step([0, 2], query_start_loc=starts(0, 2, 1), max_window_len=2),
        "in steps of 0 to 2",
    ),
    ("max_window_len missing", lambda c: c.begin_step([0], query_start_loc=starts(0, 1)), "max_window_len is None"),
    ("accepted more than the window", commit([2, 4]), "num_accepted_tokens is [2, 4]"),
    ("accepted negative", commit([-1, 0]), "num_accepted_tokens is [-1, 0]"),
    ("accepted for too few rows", commit([1]), "num_accepted_tokens.shape is [1]; allowed: [2]"),
    ("accepted as floats", commit(torch.ones(2)), "num_accepted_tokens.dtype is torch.float32"),
    ("accepted on another device", lambda c: c.commit(c.begin_step([0]), META), "num_accepted_tokens.device is 'meta'"),
    ("a step of another cache", other_cache, "step is an earlier one or another cache's"),
    ("a step that is none", lambda c: c.commit(None), "step is 'NoneType'; allowed: the Step"),
    ("x of another dtype", decode(0, x=lambda x: x.bfloat16()), "x.dtype is torch.bfloat16; allowed: torch.float32"),
    ("x of another shape", decode(0, x=lambda x: x.transpose(1, 2)), "x.shape is [2, 3, 4]; allowed: [2, 4, 3]"),
    ("x with a strided last dimension", decode(0, x=lambda x: x.mT.contiguous().mT), "x.stride()"),
    ("B with the heads' shape", decode(0, B=lambda B: B.repeat(1, 2, 1)), "B.shape is [2, 4, 6]; allowed: [2, 2, 6]"),
    ("dt of integers", decode(0, dt=lambda t: t.int()), "dt.dtype is torch.int32"),
    ("A in bfloat16", decode(0, A=-torch.ones(4).bfloat16()), "A.dtype is torch.bfloat16"),
    ("A of another length", decode(0, A=-torch.ones(2)), "A.shape is [2]; allowed: [4]"),
    ("D as a number", decode(0, D=1.0), "D is 'float'; allowed: a torch.Tensor"),
    ("z missing a token", decode(0, z=torch.ones(1, 4, 3)), "z.shape is [1, 4, 3]"),
    ("dt_softplus as text", decode(0, dt_softplus="false"), "dt_softplus is 'false'; allowed: True, False"),
    ("dt_softplus as a number", decode(0, dt_softplus=1), "dt_softplus is 1; allowed: True, False"),
    ("scale not a number", decode(1, scale=NAN), "scale is nan; allowed: None, or a finite number"),
    ("scale as text", decode(2, scale="1"), "scale is '1'"),
    ("dt with strided heads", decode(0, dt=lambda dt: dt.T.contiguous().T), "dt.stride() is (1, 2); allowed: the last"),
    ("A strided", decode(0, A=(-torch.ones(8))[::2]), "A.stride() is (2,); allowed: the last 1 dimensions contiguous"),
    ("D strided", decode(0, D=torch.ones(8)[::2]), "D.stride() is (2,)"),
    ("dt_bias expanded", decode(0, dt_bias=torch.ones(1).expand(4)), "dt_bias.stride() is (0,)"),
    ("dt sparse", decode(0, dt=lambda dt: dt.to_sparse()), "dt.layout is torch.sparse_coo; allowed: torch.strided"),
    ("out with shared rows", decode(0, out=torch.empty(1, 4, 3).expand(2, 4, 3)), "out.stride() is (0, 3, 1)"),
    ("a layer that is none", lambda c: mamba2_decode(None, c.begin_step([0]), *5 * [None]), "layer is 'NoneType'"),
    ("a step that is none", lambda c: mamba2_decode(c.layer(0), None, *5 * [None]), "step is 'NoneType'"),
    ("out of another dtype", decode(0, out=torch.empty(2, 4, 3).double()), "out.dtype is torch.float64"),
    ("tokens for another batch", decode(0, slots=[0]), "x.shape is [2, 4, 3]; allowed: [1, 4, 3]"),
    ("q repeated to the v-heads", decode(1, q=lambda q: q.repeat(1, 2, 1)), "q.shape is [2, 2, 6]; allowed: [2, 1, 6]"),
    ("k in float16", decode(1, k=lambda k: k.half()), "k.dtype is torch.float16"),
    ("v on another device", decode(1, v=lambda v: v.to("meta")), "v.device is 'meta'; allowed: cpu"),
    ("g of KDA without columns", decode(2, g=torch.ones(2, 2)), "g.shape is [2, 2]; allowed: [2, 2, 5]"),
    ("g of GDN with columns", decode(1, g=torch.ones(2, 2, 6)), "g.shape is [2, 2, 6]; allowed: [2, 2]"),
    ("dt_bias without A_log", decode(1, A_log=None), "dt_bias is 'given without A_log'"),
    ("dt_bias of another shape", decode(2, dt_bias=torch.ones(2)), "dt_bias.shape is [2]; allowed: [2, 5]"),
    ("a layer of another family", wrong_layer, "layer is 'a gdn layer'; allowed: a mamba2 layer"),
    ("unknown layer", lambda c: c.layer(1), "layer_idx is 1; allowed: one of [0, 2, 5]"),
    ("load into no slot", load([9]), "slots[0] is 9; allowed: 0 to 3"),
    ("load misses a layer", load([1], lambda s: s.pop(2)), "states is [0, 5]; allowed: every layer_idx"),
    (
        "load transposed",
        load([1], lambda s: s.update({2: s[2].mT})),
        "states[2].shape is [1, 2, 6, 5]; allowed: [1, 2, 5, 6]",
    ),
    ("load integers", load([1], lambda s: s.update({5: s[5].int()})), "states[5].dtype is torch.int32"),
    ("load twice into a slot", load([1, 1]), "every slot once"),
    ("copy to fewer slots", lambda c: c.copy([0, 2], [1]), "dst_slots is '1 slots'; allowed: as many as src_slots (2)"),
    ("copy twice to a slot", lambda c: c.copy([0, 2], [1, 1]), "every slot once"),
    ("materialize more than committed", lambda c: c.materialize(0, [0], [6]), "num_tokens is [6]"),
    ("materialize half a token", lambda c: c.materialize(0, [0], [0.5]), "num_tokens is [0.5]; allowed: integers"),
    ("materialize floats", lambda c: c.materialize(0, [0], torch.ones(1)), "num_tokens.dtype is torch.float32"),
    ("materialize elsewhere", lambda c: c.materialize(0, [0], META), "num_tokens.device is 'meta'; allowed: cpu"),
    ("take back half a token", lambda c: c.take_back([0], [0.5]), "num_tokens is [0.5]; allowed: integers"),
    ("take back nothing at all", lambda c: c.take_back([0], None), "num_tokens is None; allowed: integers"),
    ("take back a bool", lambda c: c.take_back([0], [True]), "num_tokens is [True]; allowed: integers"),
    ("take back too many bits", lambda c: c.take_back([0], [2**32]), "num_tokens is [4294967296]"),
    (
        "materialize into shared memory",
        lambda c: c.materialize(0, [0, 2], out=torch.empty(1, 4, 3, 6).expand(2, -1, -1, -1)),
        "out.stride() is (0, 18, 6, 1); allowed: memory of its own for every element",
    ),
    ("materialize into the wrong shape", lambda c: c.materialize(0, [0], out=torch.empty(1)), "out.shape is [1]"),
    ("bind to a GDN layer", lambda c: c.bind(2, torch.ones(2)), "layer_idx is 2; allowed: a Mamba-2 layer"),
    ("no slots at all", lambda c: ReplayCache(c.plan, 0), "num_slots is 0"),
    ("views of other layers", lambda c: ReplayCache(c.plan, 2, layers={0: {}}), "layers is [0]; allowed"),
    (
        "cursors as int64",
        lambda c: ReplayCache(c.plan, 2, cursors=torch.zeros(2, 4).long()),
        "cursors.dtype is torch.int64",
    ),
    ("views that share memory", two_rows_of_views, "layers[0]['state'].stride() is (0, "),
    ("cursors transposed", lambda c: ReplayCache(c.plan, 4, cursors=torch.zeros(4, 4).int().T), "cursors.stride()"),
]


@pytest.mark.parametrize(("call", "message"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_wrong_calls_change_nothing(call: Call, message: str) -> None:
    requests = Requests(ReplayCache(small_plan(), 4), 1)
    requests.load([0, 2])
    for _ in range(3):
        requests.step([0, 2], None, None)
    tensors = [t for case in LAYERS for t in requests.cache.layer(case.spec.layer_idx).tensors()]
    tensors.append(requests.cache.cursors)
    before = [t.clone() for t in tensors]
    with pytest.raises(ReplayError) as error:
        call(requests.cache)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
    assert all(torch.equal(a, b) for a, b in zip(before, tensors, strict=True))
    requests.step([2, 0], [1, 4], [1, 2])
    requests.check()
