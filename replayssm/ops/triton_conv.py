"""The causal convolution before the recurrence, in place on a pool of its states: one token a row, or windows."""

import triton
import triton.language as tl


@triton.jit
def _taps(weight, channel, there):
    """Columns of weight [channels, 4] in fp32, read as whole rows: one 8-byte load a channel."""
    tap = tl.arange(0, 4)
    rows = tl.load(weight + channel[:, None] * 4 + tap[None, :], mask=there[:, None], other=0).to(tl.float32)
    even, odd = tl.split(tl.reshape(rows, (channel.shape[0], 2, 2)))
    w0, w2 = tl.split(even)
    w1, w3 = tl.split(odd)
    return w0, w1, w2, w3


@triton.jit(do_not_specialize=["num_rows", "num_slots", "pad_slot_id"])
def conv_step_kernel(
    x, weight, bias, state, slot_indices, out, num_rows, num_slots, pad_slot_id, channels,
    stride_x, stride_slot, stride_token, stride_out,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):
    """Rows of four taps: out = act(w0 s0 + w1 s1 + w2 s2 + w3 x + bias), state [slots, 3, channels] moves up by x."""
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    there = channel < channels
    w0, w1, w2, w3 = _taps(weight, channel, there)
    base = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        base = tl.load(bias + channel, mask=there, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # the recurrence, which waits for all of this kernel before it reads
    for i in tl.static_range(ROWS):
        row = tl.program_id(1) * ROWS + i
        slot = tl.load(slot_indices + row, mask=row < num_rows, other=pad_slot_id)
        real = (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots) & there
        at = state + slot.to(tl.int64) * stride_slot + channel
        s0 = tl.load(at, mask=real, other=0)
        s1 = tl.load(at + stride_token, mask=real, other=0)
        s2 = tl.load(at + 2 * stride_token, mask=real, other=0)
        new = tl.load(x + row.to(tl.int64) * stride_x + channel, mask=real, other=0)
        acc = base + w0 * s0.to(tl.float32) + w1 * s1.to(tl.float32) + w2 * s2.to(tl.float32) + w3 * new.to(tl.float32)
        if SILU:
            acc = acc / (1.0 + tl.exp(-acc))
        tl.store(at, s1, mask=real)
        tl.store(at + stride_token, s2, mask=real)
        tl.store(at + 2 * stride_token, new.to(s2.dtype), mask=real)
        tl.store(out + row.to(tl.int64) * stride_out + channel, acc.to(out.dtype.element_ty), mask=real)


@triton.jit(do_not_specialize=["num_slots", "pad_slot_id"])
def conv_window_kernel(
    x, weight, bias, state, slot_indices, query_start_loc, num_accepted_tokens, out, num_slots, pad_slot_id, channels,
    stride_x, stride_slot, stride_token, stride_out,
    WINDOW: tl.constexpr, BLOCK: tl.constexpr, HAS_BIAS: tl.constexpr, SILU: tl.constexpr, PDL: tl.constexpr,
):
    """Windows of up to WINDOW tokens. state [slots, at least WINDOW + 2, channels]: the history of the last window and

    its tokens, of which `num_accepted_tokens` count. So it begins one row before them, and is left as (s1, s2, window).
    """
    channel = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    there = channel < channels
    w0, w1, w2, w3 = _taps(weight, channel, there)
    base = tl.zeros((BLOCK,), tl.float32)
    if HAS_BIAS:
        base = tl.load(bias + channel, mask=there, other=0).to(tl.float32)
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    slot = tl.load(slot_indices + row)
    start = tl.load(query_start_loc + row)
    count = tl.load(query_start_loc + row + 1) - start
    first = tl.minimum(tl.maximum(tl.load(num_accepted_tokens + row) - 1, 0), WINDOW - 1)
    real = (slot != pad_slot_id) & (slot >= 0) & (slot < num_slots) & (count > 0) & there
    at = state + slot.to(tl.int64) * stride_slot + channel
    history = at + first * stride_token
    s0 = tl.load(history, mask=real, other=0)
    s1 = tl.load(history + stride_token, mask=real, other=0)
    s2 = tl.load(history + 2 * stride_token, mask=real, other=0)
    tl.store(at, s1, mask=real)
    tl.store(at + stride_token, s2, mask=real)
    for i in tl.static_range(WINDOW):
        mine = real & (i < count)
        token = (start + i).to(tl.int64)
        new = tl.load(x + token * stride_x + channel, mask=mine, other=0).to(s0.dtype)
        acc = base + w0 * s0.to(tl.float32) + w1 * s1.to(tl.float32) + w2 * s2.to(tl.float32) + w3 * new.to(tl.float32)
        if SILU:
            acc = acc / (1.0 + tl.exp(-acc))
        tl.store(at + (2 + i) * stride_token, new, mask=mine)
        tl.store(out + token * stride_out + channel, acc.to(out.dtype.element_ty), mask=mine)
        s0, s1, s2 = s1, s2, new
