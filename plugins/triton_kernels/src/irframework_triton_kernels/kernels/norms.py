# mypy: disable-error-code="no-untyped-def, untyped-decorator, misc"
"""The norms: with or without a residual that is added first, with or without a quantisation behind them."""

import triton
import triton.language as tl

from irframework_triton_kernels.kernels.block_codes import stored_blocks
from irframework_triton_kernels.kernels.codes import (
    DYNAMIC,
    GROUPED,
    NVFP4,
    STATIC,
    largest_of,
    magnitudes,
    scale_of,
    stored,
    stored_groups,
    summed,
)
from irframework_triton_kernels.kernels.order import after_predecessor

# What `has_weight` may be besides true and false: a weight that says how far the scale is from one.
AROUND_ONE = tl.constexpr(2)


@triton.jit
def _read(x, x_residual, residual, columns, mask, has_residual: tl.constexpr):
    """A tile of rows as float32. With a residual it is the sum, rounded to its dtype, which is stored, too."""
    h = tl.load(x + columns, mask=mask, other=0.0).to(tl.float32)
    if has_residual:
        h += tl.load(x_residual + columns, mask=mask, other=0.0).to(tl.float32)
        rounded = h.to(residual.dtype.element_ty)
        tl.store(residual + columns, rounded, mask=mask)
        h = rounded.to(tl.float32)
    return h


@triton.jit
def _squares(h, columns, variance_size, partial: tl.constexpr):
    """What a tile adds to the sums of squares."""
    if partial:
        h = tl.where(columns < variance_size, h, 0.0)
    return h * h


@triton.jit
def inverse_root(total, variance_size, epsilon):
    """`1 / sqrt(mean + epsilon)` in float32: Triton's launcher passes epsilon as float32, Inductor's as float64."""
    return tl.rsqrt(total / variance_size + tl.cast(epsilon, tl.float32))


@triton.jit
def weight_at(weight, columns, hidden, has_weight: tl.constexpr):
    """The weight of a tile's columns; nothing is read where there is none."""
    if has_weight:
        return tl.load(weight + columns, mask=columns < hidden, other=0.0)
    else:
        return 0


@triton.jit
def scaled(h, scale, w, x, has_weight: tl.constexpr):
    """The normed tile, rounded to the weight's dtype before and after the weight is applied, and to the rows' dtype.

    A weight around one is applied in float32, and the tile is rounded once.
    """
    h = h * scale
    if has_weight == AROUND_ONE:
        h = h * (1.0 + w.to(tl.float32))
    elif has_weight:
        h = (h.to(w.dtype).to(tl.float32) * w.to(tl.float32)).to(w.dtype)
    return h.to(x.dtype.element_ty).to(tl.float32)


@triton.jit
def _stored(
    y,
    start,
    columns,
    h,
    inverse,
    mask,
    x,
    code_scale,
    row,
    rows,
    hidden,
    batches,
    global_scale,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    group_size: tl.constexpr,
    column_major: tl.constexpr,
    power_of_two: tl.constexpr,
):
    """Stores a tile of rows, `block` normed values from `start` on, as `codes` says."""
    if codes == GROUPED:
        stored_groups(
            y, start, h, mask, x, code_scale, row, rows, hidden, batches,
            group_size, column_major, power_of_two, hardware, tile_rows, block,
        )  # fmt: skip
    elif codes == NVFP4:
        stored_blocks(y, start, h, x, code_scale, global_scale, row, rows, hidden, tile_rows, block)
    else:
        stored(y, columns, h, inverse, mask, x, codes, hardware)


@triton.jit
def scale_read_again(
    again, weight, x, scale, live, hidden, has_weight: tl.constexpr, tile_rows: tl.constexpr, block: tl.constexpr
):
    """The scale for the codes of rows that are normed by `scale`, and read once more in parts, from `again`."""
    columns = tl.arange(0, block)[None, :]
    most = tl.zeros((tile_rows, block), tl.int32)
    for start in range(0, hidden, block):
        at = start + columns
        h = tl.load(again + at, mask=live & (at < hidden), other=0.0).to(tl.float32)
        h = scaled(h, scale, weight_at(weight, at, hidden, has_weight), x, has_weight)
        most = tl.maximum(most, magnitudes(h))
    return scale_of(largest_of(most, tile_rows))


@triton.jit
def norm_rows(
    tile,
    x,
    x_residual,
    weight,
    y,
    residual,
    code_scale,
    rows,
    hidden,
    variance_size,
    x_stride,
    x_residual_stride,
    epsilon,
    has_residual: tl.constexpr,
    has_weight: tl.constexpr,
    partial: tl.constexpr,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    whole: tl.constexpr,
    batches=1,
    group_size: tl.constexpr = 1,
    column_major: tl.constexpr = False,
    power_of_two: tl.constexpr = False,
    global_scale=1.0,
):
    """Norms the rows of one tile. Of what follows `whole`, the first four are for groups, the last one is for NVFP4.

    A row is `block` elements and `tail` more, all in registers; if it is not whole, it is read again from `residual`
    (or x) for each of the passes: the sum of squares, the largest magnitude, the result.
    """
    row = tl.full((tile_rows, 1), tile_rows, tl.int64) * tile + tl.arange(0, tile_rows)[:, None]
    live = row < rows
    x += row * x_stride
    if codes == NVFP4:
        y += row * (hidden // 2)
    else:
        y += row * hidden
    if has_residual:
        x_residual += row * x_residual_stride
        residual += row * hidden
    known_scale = tl.load(code_scale) if codes == STATIC else 1.0
    columns = tl.arange(0, block)[None, :]
    if whole:
        behind = block + tl.arange(0, tail if tail else 1)[None, :]
        mask = live & (columns < hidden)
        mask_behind = live & (behind < hidden)
        h = _read(x, x_residual, residual, columns, mask, has_residual)
        if tail:
            h_behind = _read(x, x_residual, residual, behind, mask_behind, has_residual)
        # Before the sum, so that nothing waits for it behind the sum.
        w = weight_at(weight, columns, hidden, has_weight)
        # Behind the reads: an exact division has a branch, which reads behind it would wait for, and so for the scale.
        inverse = tl.math.div_rn(1.0, known_scale) if codes == STATIC else 1.0
        total = summed(_squares(h, columns, variance_size, partial), tile_rows)
        if tail:
            w_behind = weight_at(weight, behind, hidden, has_weight)
            total += summed(_squares(h_behind, behind, variance_size, partial), tile_rows)
        scale = inverse_root(total, variance_size, epsilon)
        h = scaled(h, scale, w, x, has_weight)
        if tail:
            h_behind = scaled(h_behind, scale, w_behind, x, has_weight)
        if codes == DYNAMIC:
            largest = largest_of(magnitudes(h), tile_rows)
            if tail:
                largest = tl.maximum(largest, largest_of(magnitudes(h_behind), tile_rows))
            row_scale = scale_of(largest)
            tl.store(code_scale + row, row_scale, mask=live)
            inverse = tl.math.div_rn(1.0, row_scale)
        _stored(
            y, 0, columns, h, inverse, mask, x, code_scale, row, rows, hidden, batches, global_scale,
            codes, hardware, tile_rows, block, group_size, column_major, power_of_two,
        )  # fmt: skip
        if tail:
            _stored(
                y, block, behind, h_behind, inverse, mask_behind, x, code_scale, row, rows, hidden, batches,
                global_scale, codes, hardware, tile_rows, tail, group_size, column_major, power_of_two,
            )  # fmt: skip
    else:
        inverse = tl.math.div_rn(1.0, known_scale) if codes == STATIC else 1.0
        squares = tl.zeros((tile_rows, block), tl.float32)
        for start in range(0, hidden if has_residual else variance_size, block):
            at = start + columns
            h = _read(x, x_residual, residual, at, live & (at < hidden), has_residual)
            squares += _squares(h, at, variance_size, True)
        scale = inverse_root(summed(squares, tile_rows), variance_size, epsilon)
        again = x
        if has_residual:
            again = residual
            # What other threads of this program stored is read next.
            tl.debug_barrier()
        if codes == DYNAMIC:
            row_scale = scale_read_again(again, weight, x, scale, live, hidden, has_weight, tile_rows, block)
            tl.store(code_scale + row, row_scale, mask=live)
            inverse = tl.math.div_rn(1.0, row_scale)
        for start in range(0, hidden, block):
            at = start + columns
            mask = live & (at < hidden)
            h = tl.load(again + at, mask=mask, other=0.0).to(tl.float32)
            h = scaled(h, scale, weight_at(weight, at, hidden, has_weight), x, has_weight)
            _stored(
                y, start, at, h, inverse, mask, x, code_scale, row, rows, hidden, batches, global_scale,
                codes, hardware, tile_rows, block, group_size, column_major, power_of_two,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def rms_norm_kernel(
    x,
    weight,
    y,
    code_scale,
    rows,
    hidden,
    variance_size,
    x_stride,
    epsilon,
    has_weight: tl.constexpr,
    partial: tl.constexpr,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    whole: tl.constexpr,
    resident: tl.constexpr,
    early: tl.constexpr,
):
    """`y = rms_norm(x, weight)`; the mean is over the first `variance_size` elements of a row.

    `y` may be codes: under `code_scale`, one number, or each row under its own, which is stored there.
    """
    if early:
        after_predecessor()
    if resident:
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, tile_rows), tl.num_programs(0)):
            norm_rows(
                tile, x, x, weight, y, y, code_scale, rows, hidden, variance_size, x_stride, x_stride, epsilon,
                False, has_weight, partial, codes, hardware, tile_rows, block, tail, whole,
            )  # fmt: skip
    else:
        norm_rows(
            tl.program_id(0), x, x, weight, y, y, code_scale, rows, hidden, variance_size, x_stride, x_stride, epsilon,
            False, has_weight, partial, codes, hardware, tile_rows, block, tail, whole,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_kernel(
    x,
    x_residual,
    weight,
    y,
    residual,
    code_scale,
    rows,
    hidden,
    variance_size,
    x_stride,
    x_residual_stride,
    epsilon,
    has_weight: tl.constexpr,
    partial: tl.constexpr,
    codes: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    whole: tl.constexpr,
    resident: tl.constexpr,
    early: tl.constexpr,
):
    """`residual = x + x_residual; y = rms_norm(residual, weight)`; codes as in `rms_norm_kernel`.

    `y` may be `x`, and `residual` may be `x_residual`, if they are contiguous: a thread reads what it overwrites. That
    needs tiles of at least one element per thread; in smaller ones, several threads hold the same element.
    """
    if early:
        after_predecessor()
    if resident:
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, tile_rows), tl.num_programs(0)):
            norm_rows(
                tile, x, x_residual, weight, y, residual, code_scale, rows, hidden, variance_size, x_stride,
                x_residual_stride, epsilon,
                True, has_weight, partial, codes, hardware, tile_rows, block, tail, whole,
            )  # fmt: skip
    else:
        norm_rows(
            tl.program_id(0), x, x_residual, weight, y, residual, code_scale, rows, hidden, variance_size, x_stride,
            x_residual_stride, epsilon,
            True, has_weight, partial, codes, hardware, tile_rows, block, tail, whole,
        )  # fmt: skip


# --- codes of groups ----------------------------------------------------------------------------------------------


@triton.jit(do_not_specialize=["rows"])
def rms_norm_groups_kernel(
    x,
    weight,
    y,
    code_scale,
    rows,
    hidden,
    batches,
    x_stride,
    epsilon,
    has_weight: tl.constexpr,
    group_size: tl.constexpr,
    column_major: tl.constexpr,
    power_of_two: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    whole: tl.constexpr,
    early: tl.constexpr,
):
    """`rms_norm(x, weight)` as codes, each group of a row under a scale of its own; scales as in `scale_place`."""
    if early:
        after_predecessor()
    norm_rows(
        tl.program_id(0), x, x, weight, y, y, code_scale, rows, hidden, hidden, x_stride, x_stride, epsilon,
        False, has_weight, False, GROUPED, hardware, tile_rows, block, tail, whole,
        batches, group_size, column_major, power_of_two,
    )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def add_rms_norm_groups_kernel(
    x,
    x_residual,
    weight,
    y,
    residual,
    code_scale,
    rows,
    hidden,
    batches,
    x_stride,
    x_residual_stride,
    epsilon,
    has_weight: tl.constexpr,
    group_size: tl.constexpr,
    column_major: tl.constexpr,
    power_of_two: tl.constexpr,
    hardware: tl.constexpr,
    tile_rows: tl.constexpr,
    block: tl.constexpr,
    tail: tl.constexpr,
    whole: tl.constexpr,
    early: tl.constexpr,
):
    """`residual = x + x_residual`, and its norm as codes of groups; `residual` as in `add_rms_norm_kernel`."""
    if early:
        after_predecessor()
    norm_rows(
        tl.program_id(0), x, x_residual, weight, y, residual, code_scale, rows, hidden, hidden, x_stride,
        x_residual_stride, epsilon,
        True, has_weight, False, GROUPED, hardware, tile_rows, block, tail, whole,
        batches, group_size, column_major, power_of_two,
    )  # fmt: skip
