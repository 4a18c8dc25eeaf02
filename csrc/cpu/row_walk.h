// Owns walking the rows of a tensor. Included by kernels_body.h, inside the namespace of one instruction set.

struct RowCursor {
  const Rows* rows;
  int64_t index[kMaxLeadingDims];
  int64_t offset;
};

static void seek(RowCursor& cursor, const Rows& rows, int64_t row) {
  cursor.rows = &rows;
  cursor.offset = 0;
  for (int d = rows.dims - 1; d >= 0; --d) {
    cursor.index[d] = row % rows.size[d];
    row /= rows.size[d];
    cursor.offset += cursor.index[d] * rows.stride[d];
  }
}

IRF_INLINE void advance(RowCursor& cursor) {
  const Rows& rows = *cursor.rows;
  for (int d = rows.dims - 1; d >= 0; --d) {
    cursor.offset += rows.stride[d];
    if (++cursor.index[d] < rows.size[d]) return;
    cursor.offset -= rows.size[d] * rows.stride[d];
    cursor.index[d] = 0;
  }
}
