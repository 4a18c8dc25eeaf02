# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The gated activations and the quantisations, which are the same kernels: one without a gate, one without codes.

And the gates that are a tensor of their own, which end in no codes.
"""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.codes import (
    INT8,
    STATIC,
    int8_scale_of,
    largest_of,
    magnitudes,
    scale_of,
    stored,
)
from irframework_triton_kernels.kernels.order import after_predecessor

SILU = tl.constexpr(0)
GELU = tl.constexpr(1)
GELU_TANH = tl.constexpr(2)
NO_GATE = tl.constexpr(3)


@triton.jit
def activated(gate, activation: tl.constexpr):
    """The activation of float32 values."""
    if activation == SILU:
        return gate / (1.0 + tl.exp(-gate))
    elif activation == GELU:
        return 0.5 * gate * (1.0 + tl.erf(gate * 0.7071067811865476))
    else:
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), which keeps its digits where tanh is near -1.
        u = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate / (1.0 + tl.exp(-2.0 * u))


@triton.jit
def value_of(x, columns, length, mask, activation: tl.constexpr):
    """`activation(x[:, :length]) * x[:, length:]` for one tile, rounded as two ops round; or x itself."""
    gate = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    if activation == NO_GATE:
        return gate
    else:
        up = tl.load(x + length + columns, mask=mask, other=0.0).to(tl.float32)
        gate = activated(gate, activation).to(x.dtype.element_ty).to(tl.float32)
        return (gate * up).to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _place(length, tile_rows: tl.constexpr, block: tl.constexpr, blocks: tl.constexpr):
    """Rows and columns of a program's tile. `blocks` follow each other in a row; 0: as many as a length needs."""
    program = tl.program_id(0)
    in_row = blocks if blocks else tl.cdiv(length, block)
    row = (program // in_row).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)[:, None]
    return row, (program % in_row) * block + tl.arange(0, block)[None, :]


@triton.jit(do_not_specialize=["rows"])
def gated_kernel(
    x,
    y,
    code_scale,
    rows,
    length,
    x_stride,
    activation: tl.constexpr,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
    early: tl.constexpr,
):
    """The gated rows, or codes of them under one scale, for one tile; the blocks of a row follow each other."""
    if early:
        after_predecessor()
    row, columns = _place(length, tile_rows, block, blocks)
    mask = (row < rows) & (columns < length)
    scale = tl.load(code_scale) if codes == STATIC else 1.0
    x += row * x_stride
    h = value_of(x, columns, length, mask, activation)
    # Behind the reads of x: an exact division has a branch, which reads behind it would wait for, and so for the scale.
    inverse = tl.math.div_rn(1.0, scale) if codes == STATIC else 1.0
    stored(y + row * length, columns, h, inverse, mask, x, codes, hardware)


@triton.jit(do_not_specialize=["rows"])
def gates_apart_kernel(
    x,
    x_up,
    y,
    rows,
    length,
    x_stride,
    x_up_stride,
    activation: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    blocks: tl.constexpr,
    early: tl.constexpr,
):
    """`activation(x) * x_up` for one tile, rounded as two ops round; the blocks of a row follow each other."""
    if early:
        after_predecessor()
    row, columns = _place(length, tile_rows, block, blocks)
    mask = (row < rows) & (columns < length)
    gate = tl.load(x + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_up + row * x_up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    gate = activated(gate, activation).to(y.dtype.element_ty).to(tl.float32)
    tl.store(y + row * length + columns, (gate * up).to(y.dtype.element_ty), mask=mask)


@triton.jit
def _scale_of(largest, codes: tl.constexpr):
    if codes == INT8:
        return int8_scale_of(largest)
    else:
        return scale_of(largest)


@triton.jit
def _quantise_rows(
    tile,
    x,
    y,
    code_scale,
    rows,
    length,
    x_stride,
    activation: tl.constexpr,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    whole: tl.constexpr,
):
    """Quantises the rows of one tile: `block` elements and `tail` more in registers, or read twice."""
    row = tl.full((tile_rows, 1), tile_rows, tl.int64) * tile + tl.arange(0, tile_rows)[:, None]
    live = row < rows
    x += row * x_stride
    y += row * length
    columns = tl.arange(0, block)[None, :]
    if whole:
        behind = block + tl.arange(0, tail if tail else 1)[None, :]
        mask = live & (columns < length)
        mask_behind = live & (behind < length)
        h = value_of(x, columns, length, mask, activation)
        largest = largest_of(magnitudes(h), tile_rows)
        if tail:
            h_behind = value_of(x, behind, length, mask_behind, activation)
            largest = tl.maximum(largest, largest_of(magnitudes(h_behind), tile_rows))
        scale = _scale_of(largest, codes)
        tl.store(code_scale + row, scale, mask=live)
        inverse = tl.math.div_rn(1.0, scale)
        stored(y, columns, h, inverse, mask, x, codes, hardware)
        if tail:
            stored(y, behind, h_behind, inverse, mask_behind, x, codes, hardware)
    else:
        most = tl.zeros((tile_rows, block), tl.int32)
        for start in range(0, length, block):
            at = start + columns
            h = value_of(x, at, length, live & (at < length), activation)
            most = tl.maximum(most, magnitudes(h))
        scale = _scale_of(largest_of(most, tile_rows), codes)
        tl.store(code_scale + row, scale, mask=live)
        inverse = tl.math.div_rn(1.0, scale)
        for start in range(0, length, block):
            at = start + columns
            mask = live & (at < length)
            h = value_of(x, at, length, mask, activation)
            stored(y, at, h, inverse, mask, x, codes, hardware)


@triton.jit(do_not_specialize=["rows"])
def gated_rows_kernel(
    x,
    y,
    code_scale,
    rows,
    length,
    x_stride,
    activation: tl.constexpr,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    whole: tl.constexpr,
    resident: tl.constexpr,
    early: tl.constexpr,
):
    """Codes of the gated rows, each row under a scale of its own, which is stored in `code_scale`."""
    if early:
        after_predecessor()
    if resident:
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, tile_rows), tl.num_programs(0)):
            _quantise_rows(
                tile, x, y, code_scale, rows, length, x_stride,
                activation, codes, hardware, tile_rows, block, tail, whole,
            )  # fmt: skip
    else:
        _quantise_rows(
            tl.program_id(0), x, y, code_scale, rows, length, x_stride,
            activation, codes, hardware, tile_rows, block, tail, whole,
        )  # fmt: skip
