# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Codes of NVFP4: how float32 becomes E2M1, and the scale of a block, in E4M3. Owns no kernel; kernels end in these.

All of it is arithmetic in float32 and on its bits, the same on every device. Rounded to nearest, ties to even.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4" (2025), appendix; OCP Microscaling Formats (E2M1).
"""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.codes import INFINITY, LARGEST, MAGNITUDE, magnitudes
from irframework_triton_kernels.tiles import NVFP4_BLOCK

BLOCK = tl.constexpr(NVFP4_BLOCK)
# From here to twice as much, the last bit of a float32 number is worth 1: what is added to it is rounded to a whole
# number, which the lowest bits are. Those of the number itself are zero.
WHOLE_NUMBERS = tl.constexpr(12582912.0)


@triton.jit
def e2m1_of(h):
    """The codes of float32 numbers, in the lowest four bits of an int32; other bits mean nothing. NaN is 0.

    Steps between numbers are 1/2 up to 2, then 1 up to 4, then 2. In each part a code is a number times 2, 1 or 1/2 and
    a constant, rounded: the least of the three, and at most 7. Where a middle is rounded to an even whole number, it is
    rounded to an even code.
    """
    h = tl.where(h == h, h, 0.0)
    size = tl.abs(h)
    code = tl.minimum(size * 2.0 + WHOLE_NUMBERS, size + (WHOLE_NUMBERS + 2.0))
    code = tl.minimum(code, tl.minimum(size * 0.5 + (WHOLE_NUMBERS + 4.0), WHOLE_NUMBERS + 7.0))
    return code.to(tl.int32, bitcast=True) | ((h.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def block_scale_of(largest, whole):
    """The scales of blocks with these largest magnitudes (bits), as bytes of E4M3, and what their elements become by.

    `whole` is the scale of the tensor, whose sign those of the blocks have, too. NaN stays, and its block becomes zero.
    """
    size = tl.abs(whole)
    scale = tl.math.div_rn(tl.math.div_rn(largest.to(tl.float32, bitcast=True), 6.0), size)
    scale = tl.where(scale > LARGEST, LARGEST, scale)
    bits = scale.to(tl.int32, bitcast=True) & MAGNITUDE
    # As in `codes_of`: 3 bits of mantissa stay from 2^-6 on; below, codes count steps of 2^-9.
    raised = bits + 0x7FFFF + ((bits >> 20) & 1)
    steps = scale + 16384.0
    small = bits < 0x3C800000
    code = tl.where(small, steps.to(tl.int32, bitcast=True) - 0x46800000, (raised >> 20) - (120 << 3))
    code = tl.where(bits > INFINITY, 0x7F, code)
    # Of NaN this makes NaN, infinity or zero, and of these the inverse becomes zero.
    used = tl.where(small, steps - 16384.0, (raised & 0x7FF00000).to(tl.float32, bitcast=True)) * size
    inverse = tl.where(used > 0.0, tl.math.div_rn(1.0, used), 0.0)
    sign = (whole.to(tl.int32, bitcast=True) >> 24) & 0x80
    return (code | sign).to(tl.uint8), inverse


@triton.jit
def stored_blocks(
    packed,
    start,
    h,
    x,
    block_scale,
    whole,
    row,
    rows,
    hidden,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Stores a tile of rows, `block` float32 values from `start` on, as codes, two in a byte, and their blocks' scales.

    `packed` is where the codes of each row begin, `block_scale` where those of all rows do.
    """
    count: tl.constexpr = block // BLOCK
    blocks = hidden // BLOCK
    parts = tl.reshape(h, (tile_rows, count, BLOCK))
    scale, inverse = block_scale_of(tl.max(magnitudes(parts), 2), whole)
    of_row = start // BLOCK + tl.arange(0, count)[None, :]
    scale = scale.to(block_scale.dtype.element_ty, bitcast=True)
    tl.store(block_scale + row * blocks + of_row, scale, mask=(row < rows) & (of_row < blocks))
    codes = tl.reshape(e2m1_of(parts * inverse[:, :, None]), (tile_rows, block // 2, 2))
    low, high = tl.split(codes)
    pairs = start // 2 + tl.arange(0, block // 2)[None, :]
    # The codes of as many as are read at once.
    at = tl.max_contiguous(packed + pairs, [1, 64 // x.dtype.element_ty.primitive_bitwidth])
    tl.store(at, (low | (high << 4)).to(tl.uint8), mask=(row < rows) & (pairs < hidden // 2))
