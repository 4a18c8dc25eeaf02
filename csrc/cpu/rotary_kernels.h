// Owns rotary_embedding. Included by kernels_body.h, inside the namespace of one instruction set.

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

static void rotary(const RotaryArgs& a, int64_t begin, int64_t end, void*) {
  switch (a.type) {
    case Type::f32:
      return rotary_of_type<float>(a, begin, end);
    case Type::bf16:
      return rotary_of_type<bf16>(a, begin, end);
    case Type::f16:
      return rotary_of_type<f16>(a, begin, end);
  }
}
