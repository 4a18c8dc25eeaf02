# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""Products of few rows with a matrix, and the gate behind them: what takes time is to read the matrix, once.

Its rows are those of the gate, `hidden` of them, then those of what the gate multiplies. Of one row of x, a program has
one row of each half. Of more, it has some of each, which it takes in turn, so that one thread has both of a pair.
Sums are in float32, and a product is rounded as the op `linear` rounds it. Codes, in float8_e4m3fn, have one scale for
each tensor, `x_scale` and `weight_scale`; their product is in bfloat16, and what is stored are codes under a third
scale, `code_scale`. Values, in half precision, are stored as such; for them the three scales are read by nobody.
"""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.codes import STATIC, stored
from irframework_triton_kernels.kernels.gated import SILU, activated
from irframework_triton_kernels.kernels.order import after_predecessor


@triton.jit
def _read(pointers, inside, masked: tl.constexpr):
    if masked:
        return tl.load(pointers, mask=inside, other=0.0)
    else:
        return tl.load(pointers)


@triton.jit
def _gated(gate, up, scale, dtype: tl.constexpr):
    """`silu(gate) * up` of two sums, in float32, rounded to a dtype as product, activation and gate round."""
    gate = (gate * scale).to(dtype).to(tl.float32)
    up = (up * scale).to(dtype).to(tl.float32)
    gate = activated(gate, SILU).to(dtype).to(tl.float32)
    return (gate * up).to(dtype).to(tl.float32)


@triton.jit(do_not_specialize=["rows"])
def gated_product_of_one_kernel(
    x,
    weight,
    y,
    x_scale,
    weight_scale,
    code_scale,
    rows,
    length: tl.constexpr,
    hidden: tl.constexpr,
    weight_stride,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """One column of the gated product of one row; `block` elements of it are read at a time.

    `x` is `[1, length]`, `weight` `[2 * hidden, length]`, and `y` `[1, hidden]`.
    """
    if early:
        after_predecessor()
    column = tl.program_id(0).to(tl.int64)
    up_weight = weight + (column + hidden) * weight_stride  # of 64 bits, as the column is
    weight += column * weight_stride
    place = tl.arange(0, block)
    gates = tl.zeros((block,), tl.float32)
    ups = tl.zeros((block,), tl.float32)
    masked: tl.constexpr = length % block != 0
    for start in range(0, length, block):
        at = start + place
        inside = at < length
        gate = _read(weight + at, inside, masked)
        up = _read(up_weight + at, inside, masked)
        h = _read(x + at, inside, masked).to(tl.float32)
        gates += gate.to(tl.float32) * h
        ups += up.to(tl.float32) * h
    if codes == STATIC:
        h = _gated(tl.sum(gates), tl.sum(ups), tl.load(x_scale) * tl.load(weight_scale), tl.bfloat16)
        inverse = tl.math.div_rn(1.0, tl.load(code_scale))
    else:
        h = _gated(tl.sum(gates), tl.sum(ups), 1.0, x.dtype.element_ty)
        inverse = 1.0
    one = tl.arange(0, 1)[None, :]
    stored(y + column, one, tl.full((1, 1), 0.0, tl.float32) + h, inverse, one == 0, x, codes, hardware)


@triton.jit(do_not_specialize=["rows"])
def gated_product_kernel(
    x,
    weight,
    y,
    x_scale,
    weight_scale,
    code_scale,
    rows,
    length: tl.constexpr,
    hidden: tl.constexpr,
    x_stride,
    weight_stride,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    columns: tl.constexpr,
    block: tl.constexpr,
    turn: tl.constexpr,
    early: tl.constexpr,
):
    """Some columns of the gated product of at most `tile_rows` rows; `block` elements of each are read at a time.

    `x` is `[rows, length]`, `weight` `[2 * hidden, length]`, and `y` `[rows, hidden]`.
    Each program begins `turn` blocks behind the one before, so that not all read the same part of the rows at once.
    """
    if early:
        after_predecessor()
    first = tl.program_id(0) * columns
    row = tl.arange(0, tile_rows)
    both = tl.arange(0, 2 * columns)
    # A gate, what it multiplies, the next gate. Behind the last column the last one is read once more.
    of_weight = tl.minimum(first + both // 2, hidden - 1) + both % 2 * hidden
    place = tl.arange(0, block)
    x += row.to(tl.int64)[:, None] * x_stride
    weight += of_weight.to(tl.int64)[None, :] * weight_stride
    live = row[:, None] < rows
    products = tl.zeros((tile_rows, 2 * columns), tl.float32)
    masked: tl.constexpr = length % block != 0
    whole: tl.constexpr = tl.cdiv(length, block) * block
    for step in range(0, length, block):
        start = tl.multiple_of((step + tl.program_id(0) * (turn * block)) % whole, block) if turn else step
        at = start + place
        inside = at < length
        h = tl.load(x + at[None, :], mask=live & inside[None, :] if masked else live, other=0.0)
        products = tl.dot(h, _read(weight + at[:, None], inside[:, None], masked), products)
    gate, up = products.reshape(tile_rows, columns, 2).split()
    if codes == STATIC:
        h = _gated(gate, up, tl.load(x_scale) * tl.load(weight_scale), tl.bfloat16)
        inverse = tl.math.div_rn(1.0, tl.load(code_scale))
    else:
        h = _gated(gate, up, 1.0, x.dtype.element_ty)
        inverse = 1.0
    column = first + tl.arange(0, columns)[None, :]
    stored(y + row.to(tl.int64)[:, None] * hidden, column, h, inverse, live & (column < hidden), x, codes, hardware)
