"""A read copy times the columns of a whole window on the tensor cores, for the window kernels of all families.

A code is exact in fp16, and so is an nvfp4 code times its block's scale: they have six
significant bits together and are multiples of 2^-24 once the codes are taken times 2^-14. So nvfp4 is multiplied by its
scales before the product and all of K goes into one sum. int8 has a sum for each block of 32, scaled in fp32.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from replayssm.ops.gluon_formats import half_of_e4m3, half_of_int8
from replayssm.ops.gluon_window_parts import columns_shared, mma_layout


@gluon.constexpr_function
def codes_a_row(read, k_dim):
    """Elements of the codes' dtype in a row."""
    return k_dim // 2 if read == "nvfp4" else k_dim


@gluon.constexpr_function
def code_width(read, k_dim):
    """Neighbouring codes of a lane: 16 bytes, or its quarter of an int8 block, or of a row."""
    return {"bf16": 8, "int8": 8, "fp8": min(16, k_dim // 4), "nvfp4": min(16, k_dim // 8)}[read]


@gluon.constexpr_function
def staging_layout(k_dim, warps):
    """[columns, K] of what multiplies the copy: 8 neighbours along K a thread."""
    return gl.BlockedLayout([1, 8], [256 // k_dim, k_dim // 8], [warps, 1], [1, 0])


@gluon.constexpr_function
def operand_sets(read, exact):
    """Operands that the columns are staged as: nvfp4's even and odd elements of K; bf16's values and what they lack."""
    return 2 if read == "nvfp4" or (read == "bf16" and not exact) else 1


@gluon.jit
def scaled_halves_of_e2m1(codes, scales):
    """Low and high codes of packed bytes times their scales (fp16), as fp16, times 2^-14: exact."""
    return gl.inline_asm_elementwise(
        """{
        .reg .b32 a, s;
        shr.u32 s, $4, 3;
        and.b32 a, $4, 0x80808080;
        lop3.b32 a, s, 0x0E0E0E0E, a, 0xEA;
        prmt.b32 $2, a, 0, 0x1404;
        prmt.b32 $3, a, 0, 0x3424;
        shl.b32 s, $4, 1;
        shl.b32 a, $4, 4;
        and.b32 a, a, 0x80808080;
        lop3.b32 a, s, 0x0E0E0E0E, a, 0xEA;
        prmt.b32 $0, a, 0, 0x1404;
        prmt.b32 $1, a, 0, 0x3424;
        mul.rn.f16x2 $0, $0, $5;
        mul.rn.f16x2 $1, $1, $5;
        mul.rn.f16x2 $2, $2, $5;
        mul.rn.f16x2 $3, $3, $5;
        }""",
        "=&r,=&r,=&r,=&r,r,r,r", [codes, scales], dtype=(gl.float16, gl.float16), is_pure=True, pack=4,
    )  # fmt: skip


@gluon.jit
def stage_columns(x_at, x, READ: gl.constexpr, EXACT: gl.constexpr):
    """Put columns x [columns, K] in fp32, in `staging_layout`, into x_at [sets * columns, K of a set].

    Returns nothing; each column must have been brought near 1 by a power of two (nvfp4, int8, fp8).
    """
    COLUMNS: gl.constexpr = x.shape[0]
    if READ == "nvfp4":
        low, high = gl.split(gl.reshape(x.to(gl.float16), [COLUMNS, x.shape[1] // 2, 2]))
        x_at.slice(0, COLUMNS).store(low)
        x_at.slice(COLUMNS, COLUMNS).store(high)
    elif READ == "bf16":
        upper = x.to(gl.bfloat16)
        x_at.slice(0, COLUMNS).store(upper)
        if not EXACT:
            x_at.slice(COLUMNS, COLUMNS).store((x - upper.to(gl.float32)).to(gl.bfloat16))
    else:
        x_at.store(x.to(gl.float16))


@gluon.jit
def allocate_columns(READ: gl.constexpr, EXACT: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr):
    """Shared memory for `stage_columns`."""
    TYPE: gl.constexpr = gl.bfloat16 if READ == "bf16" else gl.float16
    SHAPE: gl.constexpr = [operand_sets(READ, EXACT) * COLUMNS, codes_a_row(READ, K)]
    return gl.allocate_shared_memory(TYPE, SHAPE, columns_shared(8))


@gluon.jit
def load_operands(x_at, READ: gl.constexpr, EXACT: gl.constexpr, COLUMNS: gl.constexpr, K: gl.constexpr):
    """The operands of `multiply`, as a tuple: sets, or int8's blocks of K."""
    LC: gl.constexpr = gl.DotOperandLayout(1, mma_layout(gl.num_warps()), code_width(READ, K))
    operands = ()
    if READ == "int8":
        for b in gl.static_range(K // 32):
            operands += (x_at.slice(b * 32, 32, dim=1).permute((1, 0)).load(LC),)
    else:
        for s in gl.static_range(operand_sets(READ, EXACT)):
            operands += (x_at.slice(s * COLUMNS, COLUMNS).permute((1, 0)).load(LC),)
    return operands


@gluon.jit
def tile_rows(V: gl.constexpr, LEFT: gl.constexpr, L: gl.constexpr):
    """Rows 0 to V - 1 of a tile; the last there is in place of those past LEFT."""
    rows = gl.arange(0, V, layout=L)
    if LEFT < V:
        rows = gl.minimum(rows, LEFT - 1)
    return rows


@gluon.jit
def load_codes(codes, READ: gl.constexpr, V: gl.constexpr, K: gl.constexpr, LEFT: gl.constexpr):
    """A tile's codes as left operands, as a tuple: int8's blocks of K, else one tensor."""
    LA: gl.constexpr = gl.DotOperandLayout(0, mma_layout(gl.num_warps()), code_width(READ, K))
    WIDTH: gl.constexpr = codes_a_row(READ, K)
    PIECE: gl.constexpr = 32 if READ == "int8" else WIDTH
    rows = gl.expand_dims(tile_rows(V, LEFT, gl.SliceLayout(1, LA)) * WIDTH, 1)
    at = codes + (rows + gl.expand_dims(gl.arange(0, PIECE, layout=gl.SliceLayout(0, LA)), 0))
    pieces = ()
    for b in gl.static_range(WIDTH // PIECE):
        pieces += (gl.load(at + b * PIECE),)
    return pieces


@gluon.jit
def load_scales(scales, codes, READ: gl.constexpr, V: gl.constexpr, K: gl.constexpr, LEFT: gl.constexpr):
    """A tile's scales as `multiply` takes them, as a tuple: nvfp4 [V, blocks], int8 a [V] a block, fp8 [V]."""
    LV: gl.constexpr = gl.SliceLayout(1, mma_layout(gl.num_warps()))
    if READ == "nvfp4":
        BLOCKS: gl.constexpr = K // 16
        L: gl.constexpr = gl.SliceLayout(2, gl.reshape(codes[0], [V, BLOCKS, 8]).type.layout)
        rows = gl.expand_dims(tile_rows(V, LEFT, gl.SliceLayout(1, L)) * BLOCKS, 1)
        return (gl.load(scales + (rows + gl.expand_dims(gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, L)), 0))),)
    elif READ == "int8":
        rows = tile_rows(V, LEFT, LV) * (K // 32)
        loaded = ()
        for b in gl.static_range(K // 32):
            loaded += (gl.load(scales + (rows + b)),)
        return loaded
    elif READ == "fp8":
        return (gl.load(scales + tile_rows(V, LEFT, LV)),)
    else:
        return ()


@gluon.jit
def multiply(codes, scales, operands, READ: gl.constexpr, COLUMNS: gl.constexpr):
    """[V, columns]: the copy times the columns, but for a head's scale (nvfp4: times 2^-14)."""
    MMA: gl.constexpr = mma_layout(gl.num_warps())
    V: gl.constexpr = codes[0].shape[0]
    acc = gl.zeros([V, COLUMNS], gl.float32, layout=MMA)
    if READ == "nvfp4":
        LA: gl.constexpr = codes[0].type.layout
        BLOCKS: gl.constexpr = scales[0].shape[1]
        scale = gl.expand_dims(half_of_e4m3(scales[0]), 2)
        scale, _ = gl.broadcast(scale, gl.reshape(codes[0], [V, BLOCKS, 8]))
        scale = gl.convert_layout(gl.reshape(scale, [V, BLOCKS * 8]), LA, assert_trivial=True)
        low, high = scaled_halves_of_e2m1(codes[0], scale)
        acc = mma_v2(high, operands[1], mma_v2(low, operands[0], acc))
    elif READ == "int8":
        for b in gl.static_range(len(codes)):
            sums = mma_v2(half_of_int8(codes[b]), operands[b], gl.zeros([V, COLUMNS], gl.float32, layout=MMA))
            acc += sums * gl.expand_dims(scales[b].to(gl.float32), 1)
    elif READ == "fp8":
        acc = mma_v2(half_of_e4m3(codes[0]), operands[0], acc) * gl.expand_dims(scales[0], 1)
    else:
        for s in gl.static_range(len(operands)):
            acc = mma_v2(codes[0], operands[s], acc)
    return acc
