// Owns the quantisation of a finished row with a scale for each of its groups, and where these scales lie. Included by
// kernels_body.h, inside the namespace of one instruction set.

// The smallest power of two that is not below a positive number; infinity and NaN stay. A carry out of the fraction raises
// the exponent.
IRF_INLINE float power_of_two_above(float scale) {
  uint32_t bits;
  __builtin_memcpy(&bits, &scale, sizeof bits);
  if (bits >= 0x7f800000u) return scale;
  bits = (bits + 0x7fffffu) & ~0x7fffffu;
  __builtin_memcpy(&scale, &bits, sizeof scale);
  return scale;
}

// Where the scale of a row's first group is, and how far it is to the next group's.
IRF_INLINE int64_t first_scale(int64_t row, int64_t groups, int64_t tokens, bool column_major) {
  return column_major ? row / tokens * groups * tokens + row % tokens : row * groups;
}

// Returns whether codes were streamed.
template <typename T>
IRF_INLINE bool quantise_groups_of_row(const Groups& g, const T* x, uint8_t* codes, float* all_scales, int64_t row,
                                       int64_t cols, bool stream) {
  const int64_t count = cols / g.size, step = g.column_major ? g.tokens : 1;
  float* scales = all_scales + first_scale(row, count, g.tokens, g.column_major);
  bool streamed = false;
  for (int64_t group = 0; group < count; ++group) {
    const int64_t at = group * g.size;
    float scale = scale_of(largest_magnitude(x + at, g.size));
    if (g.power_of_two) scale = power_of_two_above(scale);
    scales[group * step] = scale;
    streamed |= quantise_row(x + at, codes + at, 1.0f / scale, g.size, stream);
  }
  return streamed;
}
