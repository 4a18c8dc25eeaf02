// Owns the rotary embedding on GPUs.
#include "device.cuh"
#include "launch.cuh"

namespace irframework_vllm_c::cuda {
namespace {

// The rest of a head behind the rotated part is copied. An item is E elements of a head that are written together: with
// neox those at the same place in both halves (2 * E), interleaved E neighbours, in the rest E elements.
struct RotaryLaunch {
  RotaryArgs a;
  int64_t tokens;
  uint32_t turned_items, head_items;  // of a head: rotated, and all
  uint32_t heads;                     // of query and key together
};

template <typename T>
__device__ __forceinline__ void cosines(const RotaryArgs& a, int64_t at, int64_t left, float (&to)[kElements<T>]) {
#pragma unroll
  for (int i = 0; i < kElements<T>; ++i) {
    to[i] = 0.0f;
    if (i >= left) continue;
    switch (a.cache_type) {
      case Type::f32:
        to[i] = static_cast<const float*>(a.cache)[at + i];
        break;
      case Type::bf16:
        to[i] = widen(static_cast<const bf16*>(a.cache)[at + i]);
        break;
      case Type::f16:
        to[i] = widen(static_cast<const f16*>(a.cache)[at + i]);
        break;
    }
  }
}

// No fused multiply-add: native rounds each product.
template <typename T>
__device__ __forceinline__ float turned_first(float x, float y, float cos, float sin) {
  return __fsub_rn(__fmul_rn(x, cos), __fmul_rn(y, sin));
}
template <typename T>
__device__ __forceinline__ float turned_second(float x, float y, float cos, float sin) {
  return __fadd_rn(__fmul_rn(y, cos), __fmul_rn(x, sin));
}

// One block per token.
template <typename T, bool kNeox>
__global__ void __launch_bounds__(512) rotary(const __grid_constant__ RotaryLaunch given) {
  constexpr int E = kElements<T>;
  const RotaryArgs& a = given.a;
  const int64_t half = a.rotary_dim / 2;
  enter();
  for (int64_t token = blockIdx.x; token < given.tokens; token += gridDim.x) {
    const int64_t position = a.positions[token];
    const bool known = position >= 0 && position < a.cache_rows;  // a position behind the cache gives NaN
    const int64_t cache = known ? position * a.cache_stride : 0;
    for (uint32_t item = threadIdx.x; item < given.heads * given.head_items; item += blockDim.x) {
      uint32_t head = item / given.head_items;
      const uint32_t part = item - head * given.head_items;
      const int k = a.tensor_count > 1 && head >= a.tensors[0].heads ? 1 : 0;
      const RotaryTensor& t = a.tensors[k];
      if (k == 1) head -= static_cast<uint32_t>(a.tensors[0].heads);
      const T* in = static_cast<const T*>(t.in) + offset_of(t.token_rows, token) + head * t.head_stride;
      T* out = static_cast<T*>(t.out) + (token * t.heads + head) * a.head_size;
      if (part >= given.turned_items) {
        const int64_t at = a.rotary_dim + int64_t{part - given.turned_items} * E, left = a.head_size - at;
        store_piece(out + at, load_piece(in + at, left, is_aligned(in + at)), left, is_aligned(out + at));
        continue;
      }
      float cos[E], sin[E], x[E], y[E];
      const int64_t at = int64_t{part} * E;
      if constexpr (kNeox) {
        const int64_t left = half - at;
        const uint4 first = load_piece(in + at, left, is_aligned(in + at));
        const uint4 second = load_piece(in + half + at, left, is_aligned(in + half + at));
        cosines<T>(a, cache + at, known ? left : 0, cos);
        cosines<T>(a, cache + half + at, known ? left : 0, sin);
        widen_vector<T>(first, x);
        widen_vector<T>(second, y);
#pragma unroll
        for (int i = 0; i < E; ++i) {
          const float c = known ? cos[i] : __int_as_float(0x7fffffff), before = x[i];
          x[i] = turned_first<T>(before, y[i], c, sin[i]);
          y[i] = turned_second<T>(before, y[i], c, sin[i]);
        }
        store_piece(out + at, narrow_vector<T>(x), left, is_aligned(out + at));
        store_piece(out + half + at, narrow_vector<T>(y), left, is_aligned(out + half + at));
      } else {
        const int64_t left = a.rotary_dim - at;
        const uint4 both = load_piece(in + at, left, is_aligned(in + at));
        cosines<T>(a, cache + at / 2, known ? (left < E ? left : E) / 2 : 0, cos);
        cosines<T>(a, cache + half + at / 2, known ? (left < E ? left : E) / 2 : 0, sin);
        widen_vector<T>(both, x);
#pragma unroll
        for (int i = 0; i < E; i += 2) {
          const float c = known ? cos[i / 2] : __int_as_float(0x7fffffff), s = sin[i / 2], before = x[i];
          x[i] = turned_first<T>(before, x[i + 1], c, s);
          x[i + 1] = turned_second<T>(before, x[i + 1], c, s);
        }
        store_piece(out + at, narrow_vector<T>(x), left, is_aligned(out + at));
      }
    }
  }
}

template <typename T>
void run_of(const char* op, const RotaryArgs& a, int64_t tokens, const Place& place) {
  constexpr int64_t E = kElements<T>;
  const int64_t turned = a.neox ? a.rotary_dim / 2 : a.rotary_dim, rest = a.head_size - a.rotary_dim;
  const int64_t turned_items = (turned + E - 1) / E, head_items = turned_items + (rest + E - 1) / E;
  int64_t heads = 0;
  for (int k = 0; k < a.tensor_count; ++k) {
    heads += a.tensors[k].heads;
    if (a.tensors[k].token_rows.dims > 1 && tokens > int64_t{0xffffffff}) {
      refuse(op, "more than 2^32 tokens must be equally far apart; call .contiguous() first");
    }
  }
  const int64_t items = heads * head_items;
  if (items == 0) return;
  if (items > int64_t{1} << 30) refuse(op, "a token has more than 2^30 vectors of 16 bytes");
  int threads = 32;
  while (threads < 512 && threads < items) threads *= 2;
  const Plan plan{threads, 1, 1, 1, 0, 0, 1};
  const int64_t blocks = tokens < 0x7fffffff ? tokens : 0x7fffffff;
  const RotaryLaunch args{a, tokens, static_cast<uint32_t>(turned_items), static_cast<uint32_t>(head_items),
                          static_cast<uint32_t>(heads)};
  launch(op, a.neox ? rotary<T, true> : rotary<T, false>, dim3(static_cast<unsigned>(blocks)), dim3(threads), plan, args,
         place);
}

}  // namespace

void run_rotary(const char* op, const RotaryArgs& args, int64_t tokens, const Place& place) {
  switch (args.type) {
    case Type::f32:
      return run_of<float>(op, args, tokens, place);
    case Type::bf16:
      return run_of<bf16>(op, args, tokens, place);
    case Type::f16:
      return run_of<f16>(op, args, tokens, place);
  }
}

}  // namespace irframework_vllm_c::cuda
