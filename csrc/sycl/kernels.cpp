// Owns what the kernels compute. This file is no part of the host library: the SYCL run-time library compiles it, for
// the device at hand, once per ELEMENT (the dtype of the rows: 0 float32, 1 bfloat16, 2 float16).
//
// Rounding is native's: arithmetic in float32, rounded to the dtype of the rows wherever an unfused op would have stored
// its result. The compiler is told not to contract a * b + c, so that products are rounded as well.
//
// A work-group takes a row, then the row `number of groups` further on; a work-item takes every `group size`-th element,
// so neighbours read neighbouring memory. All indices of memory have 64 bits.
#include <sycl/sycl.hpp>

#include "arguments.h"

namespace irframework_xpu_sycl {

namespace syclexp = sycl::ext::oneapi::experimental;
using Item = sycl::nd_item<1>;

// ---- dtypes ------------------------------------------------------------------------------------------------------

struct bfloat16 {
  uint16_t bits;
};

inline float widen(float v) { return v; }
inline float widen(sycl::half v) { return static_cast<float>(v); }
inline float widen(bfloat16 v) { return sycl::bit_cast<float>(static_cast<uint32_t>(v.bits) << 16); }

template <typename T>
T narrow(float v) {
  return static_cast<T>(v);
}

template <>
inline bfloat16 narrow<bfloat16>(float v) {
  const uint32_t bits = sycl::bit_cast<uint32_t>(v);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {static_cast<uint16_t>((bits >> 16) | 0x40u)};  // NaN stays NaN
  return {static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};                  // to nearest even
}

// What a value is after it was stored and read again.
template <typename T>
float rounded(float v) {
  return widen(narrow<T>(v));
}

constexpr float kLargestCode = 448.0f;
constexpr float kSmallestScale = 1.0f / (448.0f * 512.0f);

// The float8_e4m3fn code of v, which lies between -448 and 448 or is NaN, to nearest even.
inline uint8_t code_of(float v) {
  const uint32_t bits = sycl::bit_cast<uint32_t>(v), size = bits & 0x7fffffffu;
  const uint8_t sign = static_cast<uint8_t>((bits >> 24) & 0x80u);
  if (size > 0x7f800000u) return static_cast<uint8_t>(sign | 0x7fu);
  if (size < 0x3c800000u) {  // below 2^-6 codes are multiples of 2^-9: adding 2^14 leaves just those bits of the sum
    const float shifted = sycl::bit_cast<float>(size) + 16384.0f;
    return static_cast<uint8_t>(sign | (sycl::bit_cast<uint32_t>(shifted) - 0x46800000u));
  }
  // Three bits of fraction are kept of 23, and the exponent's bias becomes 7.
  return static_cast<uint8_t>(sign | ((size + 0x7ffffu + ((size >> 20) & 1u)) - (120u << 23)) >> 20);
}

inline uint8_t quantised(float v, float inverse_scale) {
  v *= inverse_scale;
  v = v < -kLargestCode ? -kLargestCode : v > kLargestCode ? kLargestCode : v;  // NaN compares false
  return code_of(v);
}

// a / b to nearest. SYCL lets a device be 2.5 units off; the remainder says by how much, and is exact.
inline float divided(float a, float b) {
  float q = a / b;
  const float size = sycl::fabs(q);
  if (size > 1e-30f && size < 1e30f && sycl::fabs(b) > 1e-30f && sycl::fabs(b) < 1e30f) {
    q = sycl::fma(sycl::fma(-q, b, a), 1.0f / b, q);
  }
  return q;
}

// ---- rows --------------------------------------------------------------------------------------------------------

inline int64_t begin_of(const Rows& rows, int64_t row) {
  if (rows.middle == 1 && rows.inner == 1) return row * rows.outer_stride;
  const int64_t rest = row / rows.inner;
  return (rest / rows.middle) * rows.outer_stride + (rest % rows.middle) * rows.middle_stride +
         (row % rows.inner) * rows.inner_stride;
}

// The values of a row, one struct for each op: `begin` reads what all elements need, with the whole group; `value`
// gives the float32 value of an element, already rounded to what the op without a quantisation would have stored.

template <typename T>
struct Plain {
  const T* x;

  void begin(Item, const RowSizes& sizes, int64_t row) { x += begin_of(sizes.x, row); }
  float value(int64_t i, const RowSizes&) const { return widen(x[i]); }
};

template <typename T, typename W>
struct Normed {
  const T* x;
  const T* residual;  // null: nothing is added
  T* sum;             // the sum of x and residual, whose elements are read again by who wrote them
  const W* weight;    // may be null
  float factor;

  void begin(Item item, const RowSizes& sizes, int64_t row) {
    x += begin_of(sizes.x, row);
    float squares = 0.0f;
    if (residual != nullptr) {
      residual += begin_of(sizes.residual, row);
      sum += begin_of(sizes.sum, row);
    }
    for (int64_t i = item.get_local_id(0); i < sizes.columns; i += item.get_local_range(0)) {
      float v = widen(x[i]);
      if (residual != nullptr) {
        const T stored = narrow<T>(v + widen(residual[i]));
        sum[i] = stored;
        v = widen(stored);
      }
      squares += v * v;
    }
    squares = sycl::reduce_over_group(item.get_group(), squares, sycl::plus<float>());
    factor = 1.0f / sycl::sqrt(divided(squares, static_cast<float>(sizes.columns)) + sizes.epsilon);
    if (residual != nullptr) x = sum;
  }

  float value(int64_t i, const RowSizes&) const {
    const float v = widen(x[i]) * factor;
    return weight == nullptr ? rounded<T>(v) : rounded<T>(rounded<W>(rounded<W>(v) * widen(weight[i])));
  }
};

enum class Gate { silu, gelu, gelu_tanh };

template <typename T, Gate gate>
struct Gated {
  const T* x;  // gate and up, side by side

  void begin(Item, const RowSizes& sizes, int64_t row) { x += begin_of(sizes.x, row); }

  float value(int64_t i, const RowSizes& sizes) const {
    const float v = widen(x[i]), up = widen(x[sizes.columns + i]);
    return rounded<T>(rounded<T>(activated(v)) * up);
  }

  static float activated(float v) {
    if constexpr (gate == Gate::silu) return v / (1.0f + sycl::exp(-v));
    if constexpr (gate == Gate::gelu) return v * 0.5f * (1.0f + sycl::erf(v * 0.70710678118654752440f));
    constexpr float root_of_2_over_pi = 0.79788456080286535588f;
    return 0.5f * v * (1.0f + sycl::tanh(root_of_2_over_pi * (v + 0.044715f * v * v * v)));
  }
};

// ---- what becomes of a row ---------------------------------------------------------------------------------------

struct Outputs {
  void* y;              // values, in the dtype of x
  uint8_t* codes;       // contiguous rows of float8_e4m3fn
  const float* scale;   // one number, or null: each row gets its own, and is
  float* scales;        // written here
};

// Runs `each` on the rows of this work-group.
template <typename Values, typename Each>
void for_rows(const Values& values, const RowSizes& sizes, Each each) {
  const Item item = sycl::ext::oneapi::this_work_item::get_nd_item<1>();
  for (int64_t row = item.get_group(0); row < sizes.rows; row += item.get_group_range(0)) {
    Values mine = values;
    mine.begin(item, sizes, row);
    each(item, mine, row);
  }
}

template <typename T, typename Values>
void store(const Values& values, const Outputs& to, const RowSizes& sizes) {
  for_rows(values, sizes, [&](Item item, const Values& mine, int64_t row) {
    T* y = static_cast<T*>(to.y) + begin_of(sizes.y, row);
    for (int64_t i = item.get_local_id(0); i < sizes.columns; i += item.get_local_range(0)) {
      y[i] = narrow<T>(mine.value(i, sizes));
    }
  });
}

template <typename Values>
void quantise(const Values& values, const Outputs& to, const RowSizes& sizes) {
  for_rows(values, sizes, [&](Item item, const Values& mine, int64_t row) {
    float scale;
    if (to.scale != nullptr) {
      scale = *to.scale;
    } else {
      // The largest of the bits without the sign is the largest size; a NaN has larger bits than infinity, and wins.
      uint32_t largest = 0;
      for (int64_t i = item.get_local_id(0); i < sizes.columns; i += item.get_local_range(0)) {
        largest = sycl::max(largest, sycl::bit_cast<uint32_t>(mine.value(i, sizes)) & 0x7fffffffu);
      }
      largest = sycl::reduce_over_group(item.get_group(), largest, sycl::maximum<uint32_t>());
      scale = divided(sycl::bit_cast<float>(largest), kLargestCode);
      if (scale < kSmallestScale) scale = kSmallestScale;
      if (item.get_local_id(0) == 0) to.scales[row] = scale;
    }
    const float inverse = divided(1.0f, scale);
    uint8_t* codes = to.codes + row * sizes.columns;
    for (int64_t i = item.get_local_id(0); i < sizes.columns; i += item.get_local_range(0)) {
      codes[i] = quantised(mine.value(i, sizes), inverse);
    }
  });
}

// ---- rotary_embedding --------------------------------------------------------------------------------------------

template <typename T, typename C>
void rotate_heads(const T* from, T* to, const C* cosines, const RotarySizes& sizes, int64_t heads, int64_t head_stride,
                  bool outside, Item item) {
  const int64_t half = sizes.half, unchanged = sizes.head_size - 2 * half;
  for (int64_t n = item.get_local_id(0); n < heads * half; n += item.get_local_range(0)) {
    const int64_t head = n / half, i = n % half;
    const int64_t first = sizes.neighbours ? 2 * i : i, second = sizes.neighbours ? 2 * i + 1 : half + i;
    const T* in = from + head * head_stride;
    T* out = to + head * sizes.head_size;
    const float a = widen(in[first]), b = widen(in[second]);
    const float nan = sycl::nan(0u);
    const float cosine = outside ? nan : widen(cosines[i]), sine = outside ? nan : widen(cosines[half + i]);
    out[first] = narrow<T>(a * cosine - b * sine);
    out[second] = narrow<T>(b * cosine + a * sine);
  }
  for (int64_t n = item.get_local_id(0); n < heads * unchanged; n += item.get_local_range(0)) {
    const int64_t head = n / unchanged, i = 2 * half + n % unchanged;
    to[head * sizes.head_size + i] = from[head * head_stride + i];
  }
}

// A position outside the cache reads nothing and gives NaN.
template <typename T, typename C>
void rotate(const void* positions, const T* query, const T* key, const C* cache, T* query_out, T* key_out,
            const RotarySizes& sizes) {
  const Item item = sycl::ext::oneapi::this_work_item::get_nd_item<1>();
  for (int64_t token = item.get_group(0); token < sizes.tokens; token += item.get_group_range(0)) {
    const int64_t position = sizes.long_positions ? static_cast<const int64_t*>(positions)[token]
                                                  : static_cast<const int32_t*>(positions)[token];
    const bool outside = position < 0 || position >= sizes.cache_rows;
    const C* cosines = cache + (outside ? 0 : position) * sizes.cache_stride;
    rotate_heads(query + begin_of(sizes.query, token), query_out + token * sizes.query_heads * sizes.head_size, cosines,
                 sizes, sizes.query_heads, sizes.query_head_stride, outside, item);
    if (key != nullptr) {
      rotate_heads(key + begin_of(sizes.key, token), key_out + token * sizes.key_heads * sizes.head_size, cosines,
                   sizes, sizes.key_heads, sizes.key_head_stride, outside, item);
    }
  }
}

// ---- what the host can launch ------------------------------------------------------------------------------------

#if ELEMENT == 0
using T = float;
#elif ELEMENT == 1
using T = bfloat16;
#else
using T = sycl::half;
#endif

#define KERNEL extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((syclexp::nd_range_kernel<1>)) void
#define ROWS_KERNEL(name, W, values, finish)                                                                         \
  KERNEL name(const T* x, const T* residual, const W* weight, const float* scale, T* y, uint8_t* codes, float* scales, \
              T* sum, RowSizes sizes) {                                                                              \
    finish(values, Outputs{y, codes, scale, scales}, sizes);                                                         \
  }
#define NORM_KERNELS(suffix, W)                                                             \
  ROWS_KERNEL(norm_##suffix, W, (Normed<T, W>{x, residual, sum, weight, 0.0f}), store<T>) \
  ROWS_KERNEL(norm_quant_##suffix, W, (Normed<T, W>{x, residual, sum, weight, 0.0f}), quantise)
#define ROTARY_KERNEL(suffix, C)                                                                                     \
  KERNEL rotary_##suffix(const void* positions, const T* query, const T* key, const C* cache, T* query_out, T* key_out, \
                         RotarySizes sizes) {                                                                        \
    rotate(positions, query, key, cache, query_out, key_out, sizes);                                                 \
  }

NORM_KERNELS(own, T)  // weights, and caches of angles, in the dtype of the rows
ROTARY_KERNEL(own, T)
#if ELEMENT != 0
NORM_KERNELS(float, float)
ROTARY_KERNEL(float, float)
#endif
ROWS_KERNEL(silu, T, (Gated<T, Gate::silu>{x}), store<T>)
ROWS_KERNEL(gelu, T, (Gated<T, Gate::gelu>{x}), store<T>)
ROWS_KERNEL(gelu_tanh, T, (Gated<T, Gate::gelu_tanh>{x}), store<T>)
ROWS_KERNEL(silu_quant, T, (Gated<T, Gate::silu>{x}), quantise)
ROWS_KERNEL(quant, T, (Plain<T>{x}), quantise)

}  // namespace irframework_xpu_sycl
