// Owns the kernels themselves, written once over vec.h. Included by isa_*.cpp, which set IRF_NAMESPACE, IRF_WIDTH,
// IRF_TABLE and IRF_ISA_NAME and are compiled with the flags of their instruction set.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace irframework_vllm_c {
namespace IRF_NAMESPACE {

#include "vec.h"

// ---- walking rows ------------------------------------------------------------------------------------------------

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

// Whether a row of `cols` can be written with streaming stores: its vectors must be aligned. A tail would be legal too,
// but then the next row is not aligned.
template <typename T>
IRF_INLINE bool may_stream(const T* p, int64_t cols) {
  return kCanStream && (uintptr_t)p % (4 * W) == 0 && cols % (2 * W) == 0;
}

template <bool kStream, typename T>
IRF_INLINE void write_two(T* p, Two v) {
  if (kStream) {
    stream_two(p, v);
  } else {
    store_two(p, v);
  }
}

// ---- rms_norm and fused_add_rms_norm -----------------------------------------------------------------------------

// Sum of squares of the row, in float32. With kAdd the row is x + residual rounded to T, which replaces residual.
// Four accumulators hide the latency of the addition and bound the rounding error of long rows.
template <bool kAdd, typename T>
IRF_INLINE float sum_of_squares(const T* x, T* residual, int64_t cols) {
  F total[4] = {F{}, F{}, F{}, F{}};
  int64_t i = 0;
  for (; i + 4 * W <= cols; i += 4 * W) {
    for (int k = 0; k < 4; k += 2) {
      Two v = load_two<T>(x + i + k * W);
      if (kAdd) {
        const Two r = load_two<T>((const T*)residual + i + k * W);
        v = {rounded<T>(v.a + r.a), rounded<T>(v.b + r.b)};
        store_two(residual + i + k * W, v);
      }
      total[k] = multiply_add(v.a, v.a, total[k]);
      total[k + 1] = multiply_add(v.b, v.b, total[k + 1]);
    }
  }
  for (; i < cols; i += W) {
    const int64_t count = cols - i < W ? cols - i : W;
    F v = load(x + i, count);
    if (kAdd) {
      v = rounded<T>(v + load((const T*)residual + i, count));
      store(residual + i, v, count);
    }
    total[0] = multiply_add(v, v, total[0]);
  }
  return sum((total[0] + total[1]) + (total[2] + total[3]));
}

struct NoWeight {};

// Native rounds the normalised value to the weight's type, multiplies in that type, and rounds to the type of x.
template <typename T, typename WT>
IRF_INLINE F scaled(F v, float scale, F weight) {
  F normalised = v * scale;
  if (__is_same(WT, NoWeight)) return normalised;
  if (__is_same(WT, bf16) && !__is_same(T, bf16)) normalised = plain_nan(normalised);
  if (__is_same(T, bf16) && !__is_same(WT, bf16)) weight = plain_nan(weight);
  return rounded<WT>(rounded<WT>(normalised) * weight);
}

template <typename T, typename WT>
IRF_INLINE Two load_weight(const WT* weight, int64_t i) {
  return load_two<T>(weight + i);
}
template <typename T>
IRF_INLINE Two load_weight(const NoWeight*, int64_t) {
  return {F{}, F{}};
}
template <typename WT>
IRF_INLINE F load_weight(const WT* weight, int64_t i, int64_t count) {
  return load(weight + i, count);
}
IRF_INLINE F load_weight(const NoWeight*, int64_t, int64_t) { return F{}; }

template <bool kStream, typename T, typename WT>
IRF_INLINE void write_scaled(const T* row, T* out, const WT* weight, float scale, int64_t cols) {
  int64_t i = 0;
  for (; i + 2 * W <= cols; i += 2 * W) {
    const Two v = load_two<T>(row + i), w = load_weight<T>(weight, i);
    write_two<kStream>(out + i, {scaled<T, WT>(v.a, scale, w.a), scaled<T, WT>(v.b, scale, w.b)});
  }
  for (; i < cols; i += W) {
    const int64_t count = cols - i < W ? cols - i : W;
    store(out + i, scaled<T, WT>(load(row + i, count), scale, load_weight(weight, i, count)), count);
  }
}

template <bool kAdd, typename T, typename WT>
static void norm_rows(const NormArgs& a, int64_t begin, int64_t end) {
  RowCursor x_cursor, residual_cursor, out_cursor;
  seek(x_cursor, a.x_rows, begin);
  seek(out_cursor, a.out_rows, begin);
  if (kAdd) seek(residual_cursor, a.residual_rows, begin);
  const WT* weight = (const WT*)a.weight;
  bool streamed = false;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + x_cursor.offset;
    T* residual = kAdd ? (T*)a.residual + residual_cursor.offset : nullptr;
    T* out = (T*)a.out + out_cursor.offset;
    const float mean = sum_of_squares<kAdd>(x, residual, a.cols) / (float)a.cols;
    const float scale = 1.0f / __builtin_sqrtf(mean + a.epsilon);
    const T* source = kAdd ? (const T*)residual : x;
    if (a.stream && may_stream(out, a.cols)) {
      write_scaled<true>(source, out, weight, scale, a.cols);
      streamed = true;
    } else {
      write_scaled<false>(source, out, weight, scale, a.cols);
    }
    advance(x_cursor);
    advance(out_cursor);
    if (kAdd) advance(residual_cursor);
  }
  if (streamed) finish_stream();
}

template <bool kAdd, typename T>
static void norm_of_type(const NormArgs& a, int64_t begin, int64_t end) {
  if (a.weight == nullptr) return norm_rows<kAdd, T, NoWeight>(a, begin, end);
  switch (a.weight_type) {
    case Type::f32:
      return norm_rows<kAdd, T, float>(a, begin, end);
    case Type::bf16:
      return norm_rows<kAdd, T, bf16>(a, begin, end);
    case Type::f16:
      return norm_rows<kAdd, T, f16>(a, begin, end);
  }
}

template <bool kAdd>
static void norm(const NormArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case Type::f32:
      return norm_of_type<kAdd, float>(a, begin, end);
    case Type::bf16:
      return norm_of_type<kAdd, bf16>(a, begin, end);
    case Type::f16:
      return norm_of_type<kAdd, f16>(a, begin, end);
  }
}

// ---- silu_and_mul and gelu_and_mul -------------------------------------------------------------------------------

template <Gate kGate>
IRF_INLINE F activation(F x) {
  if (kGate == Gate::silu) return silu(x);
  if (kGate == Gate::gelu_erf) return gelu_erf(x);
  return gelu_tanh(x);
}

template <bool kStream, Gate kGate, typename T>
IRF_INLINE void gate_row(const T* x, T* out, int64_t cols) {
  const T* up = x + cols;
  int64_t i = 0;
  for (; i + 2 * W <= cols; i += 2 * W) {
    const Two v = load_two<T>(x + i), u = load_two<T>(up + i);
    write_two<kStream>(
        out + i, {rounded<T>(activation<kGate>(v.a)) * u.a, rounded<T>(activation<kGate>(v.b)) * u.b});
  }
  for (; i < cols; i += W) {
    const int64_t count = cols - i < W ? cols - i : W;
    store(out + i, rounded<T>(activation<kGate>(load(x + i, count))) * load(up + i, count), count);
  }
}

template <Gate kGate, typename T>
static void gate_rows(const GateArgs& a, int64_t begin, int64_t end) {
  RowCursor cursor;
  seek(cursor, a.x_rows, begin);
  bool streamed = false;
  for (int64_t row = begin; row < end; ++row) {
    const T* x = (const T*)a.x + cursor.offset;
    T* out = (T*)a.out + row * a.cols;
    if (a.stream && may_stream(out, a.cols)) {
      gate_row<true, kGate>(x, out, a.cols);
      streamed = true;
    } else {
      gate_row<false, kGate>(x, out, a.cols);
    }
    advance(cursor);
  }
  if (streamed) finish_stream();
}

template <typename T>
static void gated_of_type(const GateArgs& a, int64_t begin, int64_t end) {
  switch (a.gate) {
    case Gate::silu:
      return gate_rows<Gate::silu, T>(a, begin, end);
    case Gate::gelu_erf:
      return gate_rows<Gate::gelu_erf, T>(a, begin, end);
    case Gate::gelu_tanh:
      return gate_rows<Gate::gelu_tanh, T>(a, begin, end);
  }
}

static void gated(const GateArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case Type::f32:
      return gated_of_type<float>(a, begin, end);
    case Type::bf16:
      return gated_of_type<bf16>(a, begin, end);
    case Type::f16:
      return gated_of_type<f16>(a, begin, end);
  }
}

// ---- rotary_embedding --------------------------------------------------------------------------------------------

constexpr int64_t kRotaryBlock = 256;  // cos and sin pairs that are widened at a time, on the stack

// A row of the cache as float32, fit for results that are rounded to T.
template <typename T, typename CT>
static void widen_row(const CT* from, float* to, int64_t count) {
  constexpr bool kMixed = __is_same(T, bf16) && !__is_same(CT, bf16);
  for (int64_t i = 0; i < count; i += W) {
    const int64_t n = count - i < W ? count - i : W;
    const F v = load(from + i, n);
    store(to + i, kMixed ? plain_nan(v) : v, n);
  }
}

// Halves apart: (a, b) -> (a cos - b sin, b cos + a sin). No fused multiply-add: native rounds each product.
template <typename T>
static void rotate_halves(const T* a, const T* b, T* to_a, T* to_b, const float* cos, const float* sin, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    const F va = load(a + i), vb = load(b + i), c = load(cos + i), s = load(sin + i);
    store(to_a + i, va * c - vb * s);
    store(to_b + i, vb * c + va * s);
  }
  if (i < count) {
    const int64_t n = count - i;
    const F va = load(a + i, n), vb = load(b + i, n), c = load(cos + i, n), s = load(sin + i, n);
    store(to_a + i, va * c - vb * s, n);
    store(to_b + i, vb * c + va * s, n);
  }
}

// Neighbours paired: `cos` holds each cosine twice, `sin` each sine as (-sin, sin).
template <typename T>
static void rotate_pairs(const T* x, T* to, const float* cos, const float* sin, int64_t count) {
  int64_t i = 0;
  for (; i + W <= count; i += W) {
    const F v = load(x + i);
    store(to + i, v * load(cos + i) + swap_pairs(v) * load(sin + i));
  }
  if (i < count) {
    const int64_t n = count - i;
    const F v = load(x + i, n);
    store(to + i, v * load(cos + i, n) + swap_pairs(v) * load(sin + i, n), n);
  }
}

template <typename T, typename CT>
static void rotary_tokens(const RotaryArgs& a, int64_t begin, int64_t end) {
  const int64_t pairs = a.rotary_dim / 2;
  float cos[kRotaryBlock], sin[kRotaryBlock], paired_cos[2 * kRotaryBlock], paired_sin[2 * kRotaryBlock];
  RowCursor cursors[2];
  for (int k = 0; k < a.tensor_count; ++k) seek(cursors[k], a.tensors[k].token_rows, begin);
  for (int64_t token = begin; token < end; ++token) {
    const CT* cache = (const CT*)a.cache + a.positions[token] * a.cache_stride;
    for (int64_t block = 0; block < pairs; block += kRotaryBlock) {
      const int64_t count = pairs - block < kRotaryBlock ? pairs - block : kRotaryBlock;
      widen_row<T>(cache + block, cos, count);
      widen_row<T>(cache + pairs + block, sin, count);
      if (!a.neox) {
        for (int64_t i = 0; i < count; ++i) {
          paired_cos[2 * i] = paired_cos[2 * i + 1] = cos[i];
          paired_sin[2 * i] = -sin[i];
          paired_sin[2 * i + 1] = sin[i];
        }
      }
      for (int k = 0; k < a.tensor_count; ++k) {
        const RotaryTensor& t = a.tensors[k];
        for (int64_t head = 0; head < t.heads; ++head) {
          const T* in = (const T*)t.in + cursors[k].offset + head * t.head_stride;
          T* out = (T*)t.out + (token * t.heads + head) * a.head_size;
          if (a.neox) {
            rotate_halves(in + block, in + pairs + block, out + block, out + pairs + block, cos, sin, count);
          } else {
            rotate_pairs(in + 2 * block, out + 2 * block, paired_cos, paired_sin, 2 * count);
          }
        }
      }
    }
    for (int k = 0; k < a.tensor_count; ++k) {
      const RotaryTensor& t = a.tensors[k];
      const int64_t rest = a.head_size - a.rotary_dim;
      for (int64_t head = 0; rest > 0 && head < t.heads; ++head) {
        const T* in = (const T*)t.in + cursors[k].offset + head * t.head_stride + a.rotary_dim;
        T* out = (T*)t.out + (token * t.heads + head) * a.head_size + a.rotary_dim;
        __builtin_memcpy(out, in, rest * sizeof(T));
      }
      advance(cursors[k]);
    }
  }
}

template <typename T>
static void rotary_of_type(const RotaryArgs& a, int64_t begin, int64_t end) {
  switch (a.cache_type) {
    case Type::f32:
      return rotary_tokens<T, float>(a, begin, end);
    case Type::bf16:
      return rotary_tokens<T, bf16>(a, begin, end);
    case Type::f16:
      return rotary_tokens<T, f16>(a, begin, end);
  }
}

static void rotary(const RotaryArgs& a, int64_t begin, int64_t end) {
  switch (a.type) {
    case Type::f32:
      return rotary_of_type<float>(a, begin, end);
    case Type::bf16:
      return rotary_of_type<bf16>(a, begin, end);
    case Type::f16:
      return rotary_of_type<f16>(a, begin, end);
  }
}

}  // namespace IRF_NAMESPACE

const Kernels IRF_TABLE = {IRF_ISA_NAME, IRF_NAMESPACE::norm<false>, IRF_NAMESPACE::norm<true>, IRF_NAMESPACE::gated,
                           IRF_NAMESPACE::rotary};

}  // namespace irframework_vllm_c
