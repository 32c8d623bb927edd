"""The causal convolution before the recurrence, in place on a pool of its states: one token a row, or windows."""

import triton
import triton.language as tl


@triton.jit
def _taps(rows, BLOCK: tl.constexpr):
    """Columns of rows [BLOCK, 4] in fp32."""
    even, odd = tl.split(tl.reshape(rows, (BLOCK, 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0.to(tl.float32), w1.to(tl.float32), w2.to(tl.float32), w3.to(tl.float32)


@triton.jit
def _clear(out, first, last, width, BLOCK: tl.constexpr):
    """Zeros in rows first .. last - 1 of out [tokens, width], by the programs of the grid's first axis."""
    for column in range(tl.program_id(0) * BLOCK, width, tl.num_programs(0) * BLOCK):
        columns = column + tl.arange(0, BLOCK)
        at = out + first.to(tl.int64) * width + columns
        for _ in range(first, last):
            tl.store(at, tl.zeros((BLOCK,), out.dtype.element_ty), mask=columns < width)
            at += width


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "num_slots", "pad_slot_id"])
def conv_kernel(
    x, weight, bias, state, slot_indices, query_start_loc, num_accepted_tokens, out, cleared,
    num_rows, num_tokens, num_slots, pad_slot_id, channels, width,
    stride_x, stride_slot, stride_token, stride_out,
    WINDOW: tl.constexpr, RAGGED: tl.constexpr, BLOCK: tl.constexpr,
    HAS_BIAS: tl.constexpr, SILU: tl.constexpr, CLEAR: tl.constexpr, PDL: tl.constexpr,
):
    """Four taps: out = act(w0 s0 + w1 s1 + w2 s2 + w3 x + bias) for each token of the batch's rows.

    state [slots, at least WINDOW + 2, channels]: the two inputs before a slot's last window and its tokens, of which
    `num_accepted_tokens` count; without RAGGED a window is one token. So the history begins one row before them, and
    (s1, s2, window) is left. Every load comes before the first store, which none could pass.
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    there = channel < channels
    taps = tl.load(weight + channel[:, None] * 4 + tl.arange(0, 4)[None, :], mask=there[:, None], other=0)
    base = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        base = tl.load(bias + channel, mask=there, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # the recurrence, which waits for all of this kernel before it reads
    slot = tl.load(slot_indices + row)
    start, count, first = row, 1, 0
    if RAGGED:
        start = tl.load(query_start_loc + row)
        count = tl.load(query_start_loc + row + 1) - start
        first = tl.minimum(tl.maximum(tl.load(num_accepted_tokens + row) - 1, 0), WINDOW - 1)
    from_x = x + start.to(tl.int64) * stride_x + channel
    window = ()
    for i in tl.static_range(WINDOW):
        window = window + (tl.load(from_x + i * stride_x, mask=there & (i < count), other=0),)
    real = (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots) & (count > 0) & there
    at = state + slot.to(tl.int64) * stride_slot + channel
    history = at + first * stride_token
    s0 = tl.load(history, mask=real, other=0)
    s1 = tl.load(history + stride_token, mask=real, other=0)
    s2 = tl.load(history + 2 * stride_token, mask=real, other=0)
    w0, w1, w2, w3 = _taps(taps, BLOCK)
    tl.store(at, s1, mask=real)
    tl.store(at + stride_token, s2, mask=real)
    to = out + start.to(tl.int64) * stride_out + channel
    for i in tl.static_range(WINDOW):
        mine, new = real & (i < count), window[i].to(s0.dtype)
        acc = base + w0 * s0.to(tl.float32) + w1 * s1.to(tl.float32) + w2 * s2.to(tl.float32) + w3 * new.to(tl.float32)
        if SILU:
            acc = acc / (1.0 + tl.exp(-acc))
        tl.store(at + (2 + i) * stride_token, new, mask=mine)
        # To the L2 cache, where the recurrence finds it between the states that it streams.
        tl.store(to + i * stride_out, acc.to(out.dtype.element_ty), mask=mine, eviction_policy="evict_last")
        s0, s1, s2 = s1, s2, new
    if CLEAR:
        if row == 0:
            _clear(cleared, tl.load(query_start_loc + num_rows), num_tokens, width, BLOCK)
