// Owns apply_rotary_pos_emb: heads rotated by cosines and sines that are given for every element. Included by
// kernels_body.h after rotary_kernels.h, inside the namespace of one instruction set.

// Cosines and sines of one token, for the first and the second halves of its heads: float32, and split as load_two<T>
// splits, so that this is done once for all heads.
struct HeadAngles {
  float cos[2][kRotaryBlock], sin[2][kRotaryBlock];
};

template <typename T, typename AT>
static void split_angles(const AT* from, float* to, int64_t count) {
  constexpr bool kMixed = __is_same(T, bf16) && !__is_same(AT, bf16);
  int64_t i = 0;
  for (; i + 2 * W <= count; i += 2 * W) {
    const Two v = load_two<T>(from + i);
    store(to + i, kMixed ? plain_nan(v.a) : v.a);
    store(to + i + W, kMixed ? plain_nan(v.b) : v.b);
  }
  for (; i < count; i += W) {
    const int64_t n = count - i < W ? count - i : W;
    const F v = load(from + i, n);
    store(to + i, kMixed ? plain_nan(v) : v, n);
  }
}

// (a, b) -> (a cos - b sin, b cos + a sin). Products are rounded to T where torch makes them in T: where the angles have
// that type, too. Else it makes them in float32.
template <typename T, bool kRounds>
struct Turn {
  static IRF_MEMBER F product(F a, F b) { return kRounds ? rounded<T>(a * b) : a * b; }
  static IRF_MEMBER F first(F a, F b, F cos, F sin) { return product(a, cos) - product(b, sin); }
  static IRF_MEMBER F second(F a, F b, F cos, F sin) { return product(b, cos) + product(a, sin); }

  static void halves(const T* a, const T* b, T* to_a, T* to_b, const HeadAngles& by, int64_t count) {
    const float *cos_a = by.cos[0], *cos_b = by.cos[1], *sin_a = by.sin[0], *sin_b = by.sin[1];
    int64_t i = 0;
    for (; i + 2 * W <= count; i += 2 * W) {
      const Two x = load_two<T>(a + i), y = load_two<T>(b + i);
      const int64_t j = i + W;
      store_two(to_a + i, {first(x.a, y.a, load(cos_a + i), load(sin_a + i)),
                           first(x.b, y.b, load(cos_a + j), load(sin_a + j))});
      store_two(to_b + i, {second(x.a, y.a, load(cos_b + i), load(sin_b + i)),
                           second(x.b, y.b, load(cos_b + j), load(sin_b + j))});
    }
    for (; i < count; i += W) {
      const int64_t n = count - i < W ? count - i : W;
      const F x = load(a + i, n), y = load(b + i, n);
      store(to_a + i, first(x, y, load(cos_a + i, n), load(sin_a + i, n)), n);
      store(to_b + i, second(x, y, load(cos_b + i, n), load(sin_b + i, n)), n);
    }
  }
};

template <typename T, typename AT>
static void head_angles_tokens(const HeadAnglesArgs& a, int64_t begin, int64_t end) {
  const int64_t half = a.head_size / 2;
  HeadAngles by;
  RowCursor heads, cosines, sines;
  seek(heads, a.x.token_rows, begin);
  seek(cosines, a.cos_rows, begin);
  seek(sines, a.sin_rows, begin);
  for (int64_t token = begin; token < end; ++token) {
    const T* in = (const T*)a.x.in + heads.offset;
    T* out = (T*)a.x.out + token * a.x.heads * a.head_size;
    for (int64_t block = 0; block < half; block += kRotaryBlock) {
      const int64_t count = half - block < kRotaryBlock ? half - block : kRotaryBlock;
      for (int k = 0; k < 2; ++k) {
        split_angles<T>((const AT*)a.cos + cosines.offset + k * half + block, by.cos[k], count);
        split_angles<T>((const AT*)a.sin + sines.offset + k * half + block, by.sin[k], count);
      }
      for (int64_t head = 0; head < a.x.heads; ++head) {
        const T* x = in + head * a.x.head_stride + block;
        T* y = out + head * a.head_size + block;
        Turn<T, __is_same(T, AT)>::halves(x, x + half, y, y + half, by, count);
      }
    }
    advance(heads);
    advance(cosines);
    advance(sines);
  }
}

template <typename T>
static void head_angles_of_type(const HeadAnglesArgs& a, int64_t begin, int64_t end) {
  switch (a.angle_type) {
    case Type::f32:
      return head_angles_tokens<T, float>(a, begin, end);
    case Type::bf16:
      return head_angles_tokens<T, bf16>(a, begin, end);
    case Type::f16:
      return head_angles_tokens<T, f16>(a, begin, end);
  }
}

static void head_angles(const HeadAnglesArgs& a, int64_t begin, int64_t end, void*) {
  switch (a.type) {
    case Type::f32:
      return head_angles_of_type<float>(a, begin, end);
    case Type::bf16:
      return head_angles_of_type<bf16>(a, begin, end);
    case Type::f16:
      return head_angles_of_type<f16>(a, begin, end);
  }
}
