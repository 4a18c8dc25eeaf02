# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The activations that nothing is fused to: those of one element each, and the gates with numbers or another order."""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.order import after_predecessor

# Of one element.
GELU_NEW = tl.constexpr(0)
GELU_FAST = tl.constexpr(1)
QUICK_GELU = tl.constexpr(2)
RELU2 = tl.constexpr(3)
XIELU = tl.constexpr(4)
# Gates: behind what they multiply; by a threshold; in turn with what they multiply.
MUL_SILU = tl.constexpr(5)
FATRELU = tl.constexpr(6)
SWIGLUOAI = tl.constexpr(7)


@triton.jit
def _softplus(number):
    """`log(1 + exp(number))`."""
    small = tl.exp(-tl.abs(number))
    more = 1.0 + small
    # What rounding took from `1 + small` is given back by the quotient.
    rest = tl.where(more == 1.0, small, tl.log(more) * (small / tl.where(more == 1.0, 1.0, more - 1.0)))
    return tl.maximum(number, 0.0) + rest


@triton.jit
def _expm1(h):
    """`exp(h) - 1` of numbers that are not positive; near zero by its series, for the difference loses digits there."""
    series = 1.0 + h / 8 * (1.0 + h / 9)
    series = 1.0 + h / 6 * (1.0 + h / 7 * series)
    series = 1.0 + h / 4 * (1.0 + h / 5 * series)
    series = h * (1.0 + h / 2 * (1.0 + h / 3 * series))
    return tl.where(h > -0.4, series, tl.exp(h) - 1.0)


@triton.jit
def _of_one(h, alpha_p, alpha_n, first, second, activation: tl.constexpr):
    """The activation of float32 values. tanh is written as a sigmoid, which keeps its digits where tanh is near -1."""
    if activation == GELU_NEW:
        return h / (1.0 + tl.exp(-2.0 * 0.7978845608028654 * (h + 0.044715 * h * h * h)))
    elif activation == GELU_FAST:
        return h / (1.0 + tl.exp(-2.0 * 0.7978845608 * h * (1.0 + 0.044715 * h * h)))
    elif activation == QUICK_GELU:
        return h / (1.0 + tl.exp(-1.702 * h))
    elif activation == RELU2:
        h = tl.where(h < 0.0, 0.0, h)
        return h * h
    else:
        positive = _softplus(tl.load(alpha_p).to(tl.float32))
        negative = first + _softplus(tl.load(alpha_n).to(tl.float32))
        below = tl.where(h > 0.0, 0.0, h)
        curved = negative * (_expm1(tl.minimum(below, second)) - below)
        return tl.where(h > 0.0, positive * h * h, curved) + first * h


@triton.jit
def _gated(
    x, live, start, length, first, second, activation: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr
):
    """Gates times what lies beside them or behind them, `block` from `start` on."""
    element = x.dtype.element_ty
    columns = start + tl.arange(0, block)[None, :]
    mask = live & (columns < length)
    if activation == SWIGLUOAI:
        both = 2 * start + tl.arange(0, 2 * block)[None, :]
        pairs = tl.load(x + both, mask=live & (both < 2 * length), other=0.0).to(tl.float32)
        gate, up = tl.split(tl.reshape(pairs, (tile_rows, block, 2)))
        gate = tl.minimum(gate, second, propagate_nan=tl.PropagateNan.ALL)
        up = tl.clamp(up, -second, second, propagate_nan=tl.PropagateNan.ALL)
        return gate / (1.0 + tl.exp(-gate * first)) * (up + 1.0)
    elif activation == MUL_SILU:
        up = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(x + length + columns, mask=mask, other=0.0).to(tl.float32)
        return (gate / (1.0 + tl.exp(-gate))).to(element).to(tl.float32) * up
    else:
        gate = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(x + length + columns, mask=mask, other=0.0).to(tl.float32)
        return tl.where(gate <= first, 0.0, gate) * up


@triton.jit(do_not_specialize=["rows"])
def activation_kernel(
    x,
    y,
    alpha_p,
    alpha_n,
    rows,
    length,
    x_stride,
    first,
    second,
    activation: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    early: tl.constexpr,
):
    """One tile of activations, `length` of a row; the blocks of a row follow each other.

    `first` and `second` are the op's numbers: beta and epsilon of xIELU, with `alpha_p` and `alpha_n` in memory; the
    threshold of FATReLU; alpha and limit of the gate of gpt-oss. Float32, which Inductor passes as float64.
    """
    if early:
        after_predecessor()
    blocks = tl.cdiv(length, block)
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    live = row < rows
    start = (program % blocks) * block
    columns = start + tl.arange(0, block)[None, :]
    mask = live & (columns < length)
    first = tl.cast(first, tl.float32)
    second = tl.cast(second, tl.float32)
    x += row * x_stride
    if activation >= MUL_SILU:
        h = _gated(x, live, start, length, first, second, activation, tile_rows, block)
    else:
        h = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
        h = _of_one(h, alpha_p, alpha_n, first, second, activation)
    tl.store(y + row * length + columns, h.to(y.dtype.element_ty), mask=mask)
