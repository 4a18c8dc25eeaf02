# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Codes of float8_e4m3fn and int8: how float32 becomes one, a row's scale. Owns no kernel; kernels end in these.

Sums and largest values of rows are here, too.

Source of the format: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), E4M3.
"""

import triton
import triton.language as tl

# What a kernel stores: values of the dtype of its input, codes under a scale that is given, or under one of the row.
VALUES = tl.constexpr(0)
STATIC = tl.constexpr(1)
DYNAMIC = tl.constexpr(2)
INT8 = tl.constexpr(3)  # under one of the row
GROUPED = tl.constexpr(4)  # under one of each group of a row
NVFP4 = tl.constexpr(5)  # see `block_codes`

LARGEST = tl.constexpr(448.0)
SMALLEST_SCALE = tl.constexpr(1 / (448 * 512))
SMALLEST_INT8_SCALE = tl.constexpr(2.0**-126)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
INFINITY = tl.constexpr(0x7F800000)


@triton.jit
def codes_of(h, inverse, hardware: tl.constexpr):
    """`h * inverse` as codes: float8e4nv where the device converts, else the same bits as uint8.

    Clamped to +-448, rounded to nearest even once; NaN stays NaN.
    """
    h = tl.clamp(h * inverse, -LARGEST, LARGEST, propagate_nan=tl.PropagateNan.ALL)
    if hardware:
        return h.to(tl.float8e4nv)
    else:
        bits = h.to(tl.int32, bitcast=True)
        magnitude = bits & MAGNITUDE
        # From 2^-6 on: 3 bits of mantissa stay, and a carry out of the mantissa makes the next exponent. The exponent's
        # bias is 7 instead of 127.
        normal = ((magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20) - (120 << 3)
        # Below, codes count steps of 2^-9, which is what the last bit of numbers from 2^14 on is worth.
        small = (tl.abs(h) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(magnitude < 0x3C800000, small, normal)
        code = tl.where(magnitude > INFINITY, 0x7F, code)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def summed(h, tile_rows: tl.constexpr):
    """The sum of each row, [tile_rows, 1], or of the only one: a number has no layout, so none must be changed."""
    if tile_rows == 1:
        return tl.sum(h)
    else:
        return tl.sum(h, 1)[:, None]


@triton.jit
def magnitudes(h):
    """Magnitudes as their bits, which have the order of what they mean; NaN is above all."""
    return h.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def largest_of(bits, tile_rows: tl.constexpr):
    """The largest magnitude of each row, as `summed`."""
    if tile_rows == 1:
        return tl.max(bits)
    else:
        return tl.max(bits, 1)[:, None]


@triton.jit
def scale_of(largest):
    """The scales of rows with these largest magnitudes (bits). NaN is less than nothing, so it stays."""
    scale = tl.math.div_rn(largest.to(tl.float32, bitcast=True), LARGEST)
    return tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)


@triton.jit
def _power_of_two_above(scale):
    """The smallest power of two that is not below a scale; infinities and NaN stay."""
    bits = scale.to(tl.int32, bitcast=True)
    above = (bits + 0x7FFFFF) & 0x7F800000  # a carry out of the mantissa raises the exponent
    return tl.where(bits < INFINITY, above, bits).to(tl.float32, bitcast=True)


@triton.jit
def group_scale_of(largest, power_of_two: tl.constexpr):
    """As `scale_of`, for groups; raised to powers of two on demand."""
    scale = scale_of(largest)
    if power_of_two:
        scale = _power_of_two_above(scale)
    return scale


@triton.jit
def scale_place(row, of_row, rows, groups, batches, column_major: tl.constexpr):
    """Where the scale of a row's group lies: as the group does, or beside those of this group of a batch's rows."""
    if column_major:
        of_batch = rows // batches
        batch = row // of_batch
        return (batch * groups + of_row) * of_batch + (row - batch * of_batch)
    else:
        return row * groups + of_row


@triton.jit
def int8_scale_of(largest):
    """As `scale_of`, for int8."""
    scale = tl.math.div_rn(largest.to(tl.float32, bitcast=True), 127.0)
    return tl.where(scale < SMALLEST_INT8_SCALE, SMALLEST_INT8_SCALE, scale)


@triton.jit
def int8_codes_of(h, inverse):
    """`h * inverse` as int8, rounded to nearest even once; at most 127 in size. NaN is 0."""
    h = h * inverse
    # Above 1.5 * 2^23 the last bit of a float32 number is worth 1.
    code = (tl.clamp(h, -127.0, 127.0) + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    return tl.where(h == h, code, 0).to(tl.int8)


@triton.jit
def stored(y, columns, h, inverse, mask, x, codes: tl.constexpr, hardware: tl.constexpr):
    """Stores float32 values, which were made of those of `x`, at `y`: rounded to its dtype, or as codes."""
    if codes == VALUES:
        tl.store(y + columns, h.to(y.dtype.element_ty), mask=mask)
    elif codes == INT8:
        at = tl.max_contiguous(y + columns, [1, 128 // x.dtype.element_ty.primitive_bitwidth])
        tl.store(at, int8_codes_of(h, inverse), mask=mask)
    else:
        # As many at once as are read at once. 16 bytes of codes would want another layout, and x be rearranged for it.
        at = tl.max_contiguous(y + columns, [1, 128 // x.dtype.element_ty.primitive_bitwidth])
        tl.store(at, codes_of(h, inverse, hardware), mask=mask)


@triton.jit
def stored_groups(
    y,
    start,
    h,
    mask,
    x,
    code_scale,
    row,
    rows,
    hidden,
    batches,
    group_size: tl.constexpr,
    column_major: tl.constexpr,
    power_of_two: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
):
    """Stores a tile of rows, `block` float32 values from `start` on, as codes; scales of its groups at `code_scale`.

    A group is a power of two elements, and both `start` and `block` are whole groups.
    """
    count: tl.constexpr = block // group_size
    groups = hidden // group_size
    parts = tl.reshape(h, (tile_rows, count, group_size))
    scale = group_scale_of(tl.max(magnitudes(parts), 2), power_of_two)
    of_row = start // group_size + tl.arange(0, count)[None, :]
    place = scale_place(row, of_row, rows, groups, batches, column_major)
    tl.store(code_scale + place, scale, mask=(row < rows) & (of_row < groups))
    h = tl.reshape(parts * tl.math.div_rn(1.0, scale)[:, :, None], (tile_rows, block))
    columns = start + tl.arange(0, block)[None, :]
    stored(y, columns, h, 1.0, mask, x, STATIC, hardware)
