"""The new token of a head that flushes: asked for before the state is waited for, then kept in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from replayssm.ops.mamba2.gluon_names import view
from replayssm.ops.mamba2.gluon_parts import softplus
from replayssm.ops.mamba2.gluon_read_rows import gated


@gluon.constexpr_function
def padded(length):
    return 1 << (length - 1).bit_length()


FLAT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def line_layout(width, warps):
    """[width]: an element a thread as long as there are enough."""
    return gl.BlockedLayout([max(width // (32 * warps), 1)], [32], [warps], [0])


@gluon.jit
def load_line(ptr, LENGTH: gl.constexpr):
    """A vector, in `line_layout`."""
    WIDTH: gl.constexpr = padded(LENGTH)
    i = gl.arange(0, WIDTH, layout=line_layout(WIDTH, gl.num_warps()))
    return gl.load(ptr + i, mask=i < LENGTH, other=0.0)


@gluon.jit
def load_token(
    row, h, g, dt_ptr, dt_bias_ptr, D_ptr, x_ptr, z_ptr, B_ptr, C_ptr, dt_token, x_token, x_head, z_token, z_head,
    B_token, B_group, C_token, C_group,
    P: gl.constexpr, N: gl.constexpr, HAS_D: gl.constexpr, HAS_Z: gl.constexpr, HAS_BIAS: gl.constexpr,
):  # fmt: skip
    """All of the token that the head needs, as it comes; what there is not is something else."""
    dt = gl.load(dt_ptr + row * dt_token + h)
    bias = gl.load(dt_bias_ptr + h) if HAS_BIAS else dt
    D = gl.load(D_ptr + h) if HAS_D else dt
    x = load_line(x_ptr + row * x_token + h * x_head, P)
    z = load_line(z_ptr + row * z_token + h * z_head, P) if HAS_Z else x
    B = load_line(B_ptr + row * B_token + g * B_group, N)
    return dt, bias, D, x, z, B, load_line(C_ptr + row * C_token + g * C_group, N)


@gluon.jit
def keep_line(line):
    """Put a vector into shared memory."""
    return gl.allocate_shared_memory(line.dtype, line.shape, FLAT, line)


@gluon.jit
def timestep(dt, bias, HAS_BIAS: gl.constexpr, SOFTPLUS: gl.constexpr):
    """The processed dt; see `gluon_parts.load_timestep`."""
    dt = dt.to(gl.float32)
    if HAS_BIAS:
        dt += bias.to(gl.float32)
    if SOFTPLUS:
        dt = softplus(dt)
    return dt


@gluon.jit
def sum_of(kept):
    """The sum of a vector in shared memory, computed by every warp."""
    return gl.sum(kept.load(gl.BlockedLayout([kept.shape[0] // 32], [32], [gl.num_warps()], [0])), 0)


@gluon.jit
def finish_head(kept_y, decay, skip, kept_x, kept_z, out_ptr, P: gl.constexpr, HAS_Z: gl.constexpr):
    """Outputs of a head, from the new read copy times C [bands, V-rows], once for every V-row."""
    WIDTH: gl.constexpr = kept_x.shape[0]
    L: gl.constexpr = line_layout(WIDTH, gl.num_warps())
    y = decay * view(kept_y, [WIDTH], FLAT).load(L) + skip * kept_x.load(L).to(gl.float32)
    if HAS_Z:
        y = gated(y, kept_z.load(L))
    v = gl.arange(0, WIDTH, layout=L)
    gl.store(out_ptr + v, y.to(out_ptr.dtype.element_ty), mask=v < P)
