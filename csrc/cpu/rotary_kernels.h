// Owns rotary_embedding, alone and behind a norm of each head. Included by kernels_body.h, inside the namespace of one
// instruction set.

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

// Norms the heads of one token.
template <typename T, typename WT>
static void norm_heads_by(const RotaryArgs& a, const RotaryTensor& t, const T* in, T* out) {
  for (int64_t head = 0; head < t.heads; ++head) {
    const T* x = in + head * t.head_stride;
    const float squares = sum_of_squares<false, T>(x, nullptr, nullptr, a.head_size);
    const float scale = 1.0f / __builtin_sqrtf(squares / (float)a.head_size + a.epsilon);
    TensorSink<false, T> sink{out + head * a.head_size};
    write_scaled(x, sink, (const WT*)t.weight, scale, a.head_size);
  }
}

template <typename T>
static void norm_heads(const RotaryArgs& a, const RotaryTensor& t, const T* in, T* out) {
  if (t.weight == nullptr) return norm_heads_by<T, NoWeight>(a, t, in, out);
  switch (t.weight_type) {
    case Type::f32:
      return norm_heads_by<T, float>(a, t, in, out);
    case Type::bf16:
      return norm_heads_by<T, bf16>(a, t, in, out);
    case Type::f16:
      return norm_heads_by<T, f16>(a, t, in, out);
  }
}

// Where the heads of one token are read.
template <typename T>
struct Heads {
  const T* at;
  int64_t stride;
};

template <typename T, typename CT>
static void rotary_tokens(const RotaryArgs& a, int64_t begin, int64_t end) {
  const int64_t pairs = a.rotary_dim / 2;
  float cos[kRotaryBlock], sin[kRotaryBlock], paired_cos[2 * kRotaryBlock], paired_sin[2 * kRotaryBlock];
  RowCursor cursors[2];
  for (int k = 0; k < a.tensor_count; ++k) seek(cursors[k], a.tensors[k].token_rows, begin);
  for (int64_t token = begin; token < end; ++token) {
    const CT* cache = (const CT*)a.cache + a.positions[token] * a.cache_stride;
    Heads<T> heads[2];
    for (int k = 0; k < a.tensor_count; ++k) {
      const RotaryTensor& t = a.tensors[k];
      heads[k] = {(const T*)t.in + cursors[k].offset, t.head_stride};
      if (a.normed) {  // into the result, where they are then rotated
        T* out = (T*)t.out + token * t.heads * a.head_size;
        norm_heads(a, t, heads[k].at, out);
        heads[k] = {out, a.head_size};
      }
      advance(cursors[k]);
    }
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
          const T* in = heads[k].at + head * heads[k].stride;
          T* out = (T*)t.out + (token * t.heads + head) * a.head_size;
          if (a.neox) {
            rotate_halves(in + block, in + pairs + block, out + block, out + pairs + block, cos, sin, count);
          } else {
            rotate_pairs(in + 2 * block, out + 2 * block, paired_cos, paired_sin, 2 * count);
          }
        }
      }
    }
    const int64_t rest = a.normed ? 0 : a.head_size - a.rotary_dim;
    for (int k = 0; k < a.tensor_count && rest > 0; ++k) {
      const RotaryTensor& t = a.tensors[k];
      for (int64_t head = 0; head < t.heads; ++head) {
        const T* in = heads[k].at + head * heads[k].stride + a.rotary_dim;
        T* out = (T*)t.out + (token * t.heads + head) * a.head_size + a.rotary_dim;
        __builtin_memcpy(out, in, rest * sizeof(T));
      }
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
