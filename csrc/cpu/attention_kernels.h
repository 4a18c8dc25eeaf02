// Owns attention of one query for each sequence. Included by kernels_body.h, inside the namespace of one instruction set.
//
// A span's keys are taken a tile at a time for all heads in turn, so that memory is read page by page. Within a tile,
// a few queries of a group share each loaded vector of keys or values. The softmax is computed online: `top` is the
// highest score so far, `total` the sum of exp(score - top), and the sums of values are scaled when `top` rises.
//
// The queries and the sums of values are float32 in the order that load_two() splits the type's vectors into.

constexpr int64_t kTile = 32;
constexpr int kTogether = W == 16 ? 4 : 2;  // queries that fit the registers beside four keys or four vectors of values

// The sums of four vectors, one after the other.
IRF_INLINE void store_sums(float* to, F a, F b, F c, F d) {
#if IRF_WIDTH == 16
  const __m512 x = (__m512)a, y = (__m512)b, z = (__m512)c, w = (__m512)d;
  const __m512 xy = _mm512_add_ps(_mm512_unpacklo_ps(x, y), _mm512_unpackhi_ps(x, y));
  const __m512 zw = _mm512_add_ps(_mm512_unpacklo_ps(z, w), _mm512_unpackhi_ps(z, w));
  const __m512 all = _mm512_add_ps(_mm512_shuffle_ps(xy, zw, 0x44), _mm512_shuffle_ps(xy, zw, 0xee));
  const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), _mm512_extractf32x8_ps(all, 1));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
#elif IRF_WIDTH == 8
  const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps((__m256)a, (__m256)b), _mm256_hadd_ps((__m256)c, (__m256)d));
  _mm_storeu_ps(to, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
  const F ab = __builtin_shufflevector(a, b, 0, 4, 1, 5) + __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const F cd = __builtin_shufflevector(c, d, 0, 4, 1, 5) + __builtin_shufflevector(c, d, 2, 6, 3, 7);
  store(to, __builtin_shufflevector(ab, cd, 0, 1, 4, 5) + __builtin_shufflevector(ab, cd, 2, 3, 6, 7));
#endif
}

IRF_INLINE float highest(F v) {
#if IRF_WIDTH == 16
  return _mm512_reduce_max_ps((__m512)v);
#else
  float lanes[W];
  store(lanes, v);
  for (int half = W / 2; half > 0; half /= 2) {
    for (int i = 0; i < half; ++i) lanes[i] = lanes[i] > lanes[i + half] ? lanes[i] : lanes[i + half];
  }
  return lanes[0];
#endif
}

IRF_INLINE float exponential_of(float x) { return exponential(splat(x))[0]; }

// 1 - 2 / (1 + e^(2x)), and the series where that would cancel.
IRF_INLINE F hyperbolic_tangent(F x) {
  const F square = x * x;
  F p = splat(62.0f / 2835.0f);
  p = multiply_add(p, square, splat(-17.0f / 315.0f));
  p = multiply_add(p, square, splat(2.0f / 15.0f));
  p = multiply_add(p, square, splat(-1.0f / 3.0f));
  const F near = multiply_add(p * square, x, x);
  const F far = 1.0f - 2.0f / (1.0f + exponential(2.0f * x));
  return choose((I)(square < 0.0625f), near, far);
}

// The last elements of a row, at most one vector of them.
template <typename T>
IRF_INLINE F load_end(const T* p, int64_t count) {
  return count >= W ? load(p) : load(p, count);
}

template <typename T>
IRF_INLINE void widen_query(const T* from, float* to, int64_t size) {
  int64_t d = 0;
  for (; d + 2 * W <= size; d += 2 * W) {
    const Two v = load_two<T>(from + d);
    store(to + d, v.a), store(to + d + W, v.b);
  }
  for (; d < size; d += W) store(to + d, load_end(from + d, size - d));
}

// Rows that will be read next. Memory answers late, and the rows of a head lie too far apart for the processor to foresee.
template <typename T>
struct Ahead {
  const T* data;
  const int64_t* at;
  int64_t count;

  IRF_MEMBER void fetch(int64_t row, int64_t first, int64_t last) const {
    if (row >= count) return;
    for (int64_t d = first; d < last; d += 64 / sizeof(T)) __builtin_prefetch(data + at[row] + d, 0, 2);
  }
};

// scores[q * kTile + i] = query q times key i, for `count` keys and up to three more, which repeat the last.
template <typename T, int N>
static void score_tile(const T* keys, const int64_t* at, int64_t count, const float* queries, int64_t query_stride,
                       int64_t size, float* scores, const Ahead<T>& ahead, int64_t ahead_size) {
  for (int64_t i = 0; i < count; i += 4) {
    const T* row[4];
    for (int k = 0; k < 4; ++k) ahead.fetch(i + k, 0, ahead_size);
    for (int k = 0; k < 4; ++k) row[k] = keys + at[i + k < count ? i + k : count - 1];
    F sums[N][4] = {};
    int64_t d = 0;
    for (; d + 2 * W <= size; d += 2 * W) {
      Two key[4];
      for (int k = 0; k < 4; ++k) key[k] = load_two<T>(row[k] + d);
      for (int q = 0; q < N; ++q) {
        const F a = load(queries + q * query_stride + d), b = load(queries + q * query_stride + d + W);
        for (int k = 0; k < 4; ++k) sums[q][k] = multiply_add(a, key[k].a, sums[q][k]);
        for (int k = 0; k < 4; ++k) sums[q][k] = multiply_add(b, key[k].b, sums[q][k]);
      }
    }
    for (; d < size; d += W) {
      F key[4];
      for (int k = 0; k < 4; ++k) key[k] = load_end(row[k] + d, size - d);
      for (int q = 0; q < N; ++q) {
        const F a = load(queries + q * query_stride + d);
        for (int k = 0; k < 4; ++k) sums[q][k] = multiply_add(a, key[k], sums[q][k]);
      }
    }
    for (int q = 0; q < N; ++q) store_sums(scores + q * kTile + i, sums[q][0], sums[q][1], sums[q][2], sums[q][3]);
  }
}

// Makes scores into weights, and returns what the sums so far are worth beside them.
static float weigh_tile(const AttentionArgs& a, float* scores, int64_t count, float& top, float& total) {
  const float lowest = -__builtin_inff();
  for (int64_t i = count; i % W != 0; ++i) scores[i] = scores[count - 1];
  F highs = splat(lowest);
  for (int64_t i = 0; i < count; i += W) {
    F score = load(scores + i) * a.scale;
    if (a.soft_cap > 0.0f) score = hyperbolic_tangent(score / a.soft_cap) * a.soft_cap;
    store(scores + i, score);
    highs = choose((I)(score > highs), score, highs);
  }
  for (int64_t i = count; i % W != 0; ++i) scores[i] = lowest;
  const float before = top, high = highest(highs);
  if (high > top) top = high;
  const float base = top == lowest ? 0.0f : top;
  F sums = F{};
  for (int64_t i = 0; i < count; i += W) {
    const F weight = exponential(load(scores + i) - base);
    store(scores + i, weight);
    sums += weight;
  }
  const float kept = before == top ? 1.0f : exponential_of(before - base);
  total = total * kept + sum(sums);
  return kept;
}

// sums[q] = kept[q] * sums[q] + weights[q] times the values, for P pairs of vectors from element d on.
template <typename T, int N, int P>
static void add_values(const T* values, const int64_t* at, int64_t count, const float* weights, const float* kept,
                       float* sums, int64_t sum_stride, int64_t d, const Ahead<T>& ahead) {
  F totals[N][2 * P];
  for (int q = 0; q < N; ++q) {
    for (int j = 0; j < 2 * P; ++j) totals[q][j] = load(sums + q * sum_stride + d + j * W) * kept[q];
  }
  for (int64_t i = 0; i < count; ++i) {
    const T* row = values + at[i] + d;
    ahead.fetch(i, d, d + 2 * P * W);
    Two value[P];
    for (int j = 0; j < P; ++j) value[j] = load_two<T>(row + 2 * j * W);
    for (int q = 0; q < N; ++q) {
      const F weight = splat(weights[q * kTile + i]);
      for (int j = 0; j < P; ++j) {
        totals[q][2 * j] = multiply_add(weight, value[j].a, totals[q][2 * j]);
        totals[q][2 * j + 1] = multiply_add(weight, value[j].b, totals[q][2 * j + 1]);
      }
    }
  }
  for (int q = 0; q < N; ++q) {
    for (int j = 0; j < 2 * P; ++j) store(sums + q * sum_stride + d + j * W, totals[q][j]);
  }
}

// The same for the last elements, at most one vector of them.
template <typename T, int N>
static void add_values_end(const T* values, const int64_t* at, int64_t count, const float* weights, const float* kept,
                           float* sums, int64_t sum_stride, int64_t d, int64_t left) {
  F totals[N];
  for (int q = 0; q < N; ++q) totals[q] = load(sums + q * sum_stride + d) * kept[q];
  for (int64_t i = 0; i < count; ++i) {
    const F value = load_end(values + at[i] + d, left);
    for (int q = 0; q < N; ++q) totals[q] = multiply_add(splat(weights[q * kTile + i]), value, totals[q]);
  }
  for (int q = 0; q < N; ++q) store(sums + q * sum_stride + d, totals[q]);
}

// Where the keys and values of a tile lie.
struct Tile {
  int64_t count;
  int64_t keys[kTile];
  int64_t values[kTile];
};

// The tile from key `first` on.
static void find_tile(const AttentionArgs& a, const AttentionSpan& span, int64_t first, Tile& tile) {
  const int64_t last = first + kTile < span.last ? first + kTile : span.last;
  tile.count = 0;
  if (a.table == nullptr) {
    for (int64_t at = first; at < last; ++at, ++tile.count) {
      tile.keys[tile.count] = (span.start + at) * a.keys.row_stride;
      tile.values[tile.count] = (span.start + at) * a.values.row_stride;
    }
    return;
  }
  for (int64_t at = first; at < last;) {
    const int64_t block = at / a.block_size, number = a.table[span.start + block];
    const int64_t next = (block + 1) * a.block_size, end = next < last ? next : last;
    for (int64_t row = at - block * a.block_size; at < end; ++at, ++row, ++tile.count) {
      tile.keys[tile.count] = number * a.keys.block_stride + row * a.keys.row_stride;
      tile.values[tile.count] = number * a.values.block_stride + row * a.values.row_stride;
    }
  }
}

// Adds a tile to the sums of N heads that read the same keys.
template <typename T, int N>
static void attend_tile(const AttentionArgs& a, const Tile& tile, int64_t kv_head, const float* queries, float* sums,
                        float* tops, const Ahead<T>& next) {
  float scores[N * kTile] __attribute__((aligned(64)));
  float kept[N];
  const T* values = (const T*)a.values.data + kv_head * a.values.head_stride;
  score_tile<T, N>((const T*)a.keys.data + kv_head * a.keys.head_stride, tile.keys, tile.count, queries,
                   a.query_width, a.head_size, scores, Ahead<T>{values, tile.values, tile.count}, a.value_size);
  for (int q = 0; q < N; ++q) kept[q] = weigh_tile(a, scores + q * kTile, tile.count, tops[2 * q], tops[2 * q + 1]);
  int64_t d = 0;
  for (; d + 4 * W <= a.value_size; d += 4 * W) {
    add_values<T, N, 2>(values, tile.values, tile.count, scores, kept, sums, a.value_width, d, next);
  }
  for (; d + 2 * W <= a.value_size; d += 2 * W) {
    add_values<T, N, 1>(values, tile.values, tile.count, scores, kept, sums, a.value_width, d, next);
  }
  for (; d < a.value_size; d += W) {
    add_values_end<T, N>(values, tile.values, tile.count, scores, kept, sums, a.value_width, d, a.value_size - d);
  }
}

template <typename T>
static void attend_group(const AttentionArgs& a, const Tile& tile, int64_t kv_head, const float* queries, float* sums,
                         float* tops, const Ahead<T>& next) {
  for (int64_t q = 0; q < a.group;) {
    const int64_t head = kv_head * a.group + q, left = a.group - q;
    const float* from = queries + head * a.query_width;
    float* to = sums + head * a.value_width;
    float* top = tops + 2 * head;
    if (left >= kTogether) {
      attend_tile<T, kTogether>(a, tile, kv_head, from, to, top, next), q += kTogether;
    } else if (left >= 2) {
      attend_tile<T, 2>(a, tile, kv_head, from, to, top, next), q += 2;
    } else {
      attend_tile<T, 1>(a, tile, kv_head, from, to, top, next), q += 1;
    }
  }
}

static float sink_of(const AttentionArgs& a, int64_t head) {
  const int64_t at = head * a.sink_stride;
  switch (a.sink_type) {
    case Type::f32:
      return ((const float*)a.sinks)[at];
    case Type::bf16:
      return load((const bf16*)a.sinks + at, 1)[0];
    case Type::f16:
      return load((const f16*)a.sinks + at, 1)[0];
  }
  return 0.0f;
}

// Writes a head's result. A sequence without keys gives zeros.
template <typename T>
static void finish_head(const AttentionArgs& a, int64_t token, int64_t head, bool empty, const float* sums, float top,
                        float total) {
  float factor = 1.0f;
  if (a.sinks != nullptr && !empty) {
    const float sink = sink_of(a, head);
    if (sink > top) {
      factor = exponential_of(top - sink);
      total = total * factor + 1.0f;
    } else {
      total += exponential_of(sink - top);
    }
  }
  factor = empty ? 0.0f : factor / total;
  T* out = (T*)a.out + (token * a.kv_heads * a.group + head) * a.value_size;
  int64_t d = 0;
  for (; d + 2 * W <= a.value_size; d += 2 * W) {
    store_two(out + d, Two{plain_nan(load(sums + d) * factor), plain_nan(load(sums + d + W) * factor)});
  }
  for (; d < a.value_size; d += W) {
    const F v = plain_nan(load(sums + d) * factor);
    if (a.value_size - d >= W) {
      store(out + d, v);
    } else {
      store(out + d, v, a.value_size - d);
    }
  }
}

// Attention over the heads [first, last) of keys in one span.
template <typename T>
static void attend_span(const AttentionArgs& a, const AttentionSpan& span, int64_t first, int64_t last, float* scratch) {
  const int64_t heads = a.kv_heads * a.group;
  float* queries = scratch;
  float* sums = span.part < 0 ? scratch + heads * a.query_width : a.parts + span.part * a.part_width;
  float* tops = sums + heads * a.value_width;
  for (int64_t head = first * a.group; head < last * a.group; ++head) {
    widen_query((const T*)a.query + span.token * a.token_stride + head * a.head_stride, queries + head * a.query_width,
                a.head_size);
    __builtin_memset(sums + head * a.value_width, 0, a.value_width * sizeof(float));
    tops[2 * head] = -__builtin_inff();
    tops[2 * head + 1] = 0.0f;
  }
  Tile tiles[2];
  find_tile(a, span, span.first, tiles[0]);
  for (int64_t at = span.first; at < span.last; at += kTile) {
    const Tile& tile = tiles[(at - span.first) / kTile % 2];
    Tile& after = tiles[1 - (at - span.first) / kTile % 2];
    find_tile(a, span, at + kTile, after);
    for (int64_t kv_head = first; kv_head < last && tile.count > 0; ++kv_head) {
      const bool more = kv_head + 1 < last;
      const T* keys = (const T*)a.keys.data + (more ? kv_head + 1 : first) * a.keys.head_stride;
      const Ahead<T> next = {keys, more ? tile.keys : after.keys, more ? tile.count : after.count};
      attend_group<T>(a, tile, kv_head, queries, sums, tops, next);
    }
  }
  if (span.part >= 0) return;
  for (int64_t head = first * a.group; head < last * a.group; ++head) {
    finish_head<T>(a, span.token, head, span.first == span.last, sums + head * a.value_width, tops[2 * head],
                   tops[2 * head + 1]);
  }
}

static float* aligned(void* scratch) { return (float*)(((uintptr_t)scratch + 63) / 64 * 64); }

template <typename T>
static void attend_spans(const AttentionArgs& a, int64_t begin, int64_t end, void* scratch) {
  while (begin < end) {
    const int64_t span = begin / a.kv_heads, first = begin - span * a.kv_heads;
    const int64_t last = end - begin < a.kv_heads - first ? first + end - begin : a.kv_heads;
    attend_span<T>(a, a.spans[span], first, last, aligned(scratch));
    begin += last - first;
  }
}

// Items are the heads of keys of each span.
static void attended(const AttentionArgs& a, int64_t begin, int64_t end, void* scratch) {
  switch (a.type) {
    case Type::f32:
      return attend_spans<float>(a, begin, end, scratch);
    case Type::bf16:
      return attend_spans<bf16>(a, begin, end, scratch);
    case Type::f16:
      return attend_spans<f16>(a, begin, end, scratch);
  }
}

// Puts the parts of a head together, in the first one's memory.
template <typename T>
static void join_parts(const AttentionArgs& a, const AttentionJoin& join, int64_t head) {
  const int64_t heads = a.kv_heads * a.group;
  float* sums = a.parts + join.part * a.part_width + head * a.value_width;
  const float* tops = a.parts + join.part * a.part_width + heads * a.value_width + 2 * head;
  float top = -__builtin_inff(), total = 0.0f;
  for (int64_t part = 0; part < join.count; ++part) {
    if (tops[part * a.part_width] > top) top = tops[part * a.part_width];
  }
  const float base = top == -__builtin_inff() ? 0.0f : top;
  for (int64_t part = 0; part < join.count; ++part) {
    const float* from = sums + part * a.part_width;
    const float worth = exponential_of(tops[part * a.part_width] - base);
    total += worth * tops[part * a.part_width + 1];
    for (int64_t d = 0; d < a.value_width; d += W) {
      store(sums + d, part == 0 ? load(from + d) * worth : multiply_add(load(from + d), splat(worth), load(sums + d)));
    }
  }
  finish_head<T>(a, join.token, head, false, sums, top, total);
}

// Items are the heads of queries of each sequence that was cut into parts.
static void joined_parts(const AttentionArgs& a, int64_t begin, int64_t end, void*) {
  const int64_t heads = a.kv_heads * a.group;
  for (int64_t item = begin; item < end; ++item) {
    const AttentionJoin& join = a.joins[item / heads];
    switch (a.type) {
      case Type::f32:
        join_parts<float>(a, join, item % heads);
        break;
      case Type::bf16:
        join_parts<bf16>(a, join, item % heads);
        break;
      case Type::f16:
        join_parts<f16>(a, join, item % heads);
        break;
    }
  }
}
