// Owns the kernels that have to see a whole row before they can write it: the norms, and quantisation with a scale per
// row. `held_rows` reads a row once and holds it in registers; `read_again` takes rows of any length and address and reads
// them once per step. Both give element i of a row to the same thread and add up in the same order, so that their
// results are the same. Included by rows_*.cu, one per element type.
#pragma once
#include <type_traits>

#include "arithmetic.cuh"
#include "device.cuh"
#include "launch.cuh"
#include "together.cuh"

namespace irframework_vllm_c::cuda {
namespace {

// ---- rows held in registers -----------------------------------------------------------------------------------------

template <typename T, Source kSource, int V>
struct Held {
  uint4 first[V];
  uint4 second[kSource == Source::plain ? 1 : V];

  __device__ __forceinline__ void load(const RowArgs& a, uint32_t row, int begin, int step, int chunks) {
    constexpr int E = kElements<T>;
    if (row >= static_cast<uint32_t>(a.rows)) return;
    const T* x = static_cast<const T*>(a.x) + offset_of(a.x_rows, row);
    const T* other = nullptr;
    if constexpr (kSource == Source::add) {
      other = static_cast<const T*>(a.residual) + offset_of(a.residual_rows, row);
    } else if constexpr (kSource == Source::silu) {
      other = x + a.cols;
    }
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int chunk = begin + k * step;
      first[k] = make_uint4(0, 0, 0, 0);
      if constexpr (kSource != Source::plain) second[k] = make_uint4(0, 0, 0, 0);
      if (chunk < chunks) {
        first[k] = load_once(x + chunk * E);
        if constexpr (kSource != Source::plain) second[k] = load_once(other + chunk * E);
      }
    }
  }
};

// Bounds that leave a thread the registers it needs (42, 64 or 128), and let enough threads be on a multiprocessor to have
// 48 KiB or more on their way to it.
constexpr int least_blocks(Source source, int vectors, bool ahead) {
  const int needed = vectors * (ahead || source != Source::plain ? 2 : 1);
  return needed <= 2 ? 3 : needed <= 4 ? 2 : 1;
}

template <int V>
__device__ __forceinline__ void load_weight(uint4 (&weight)[V], const void* from, int begin, int step, int chunks) {
#pragma unroll
  for (int k = 0; k < V; ++k) {
    weight[k] = make_uint4(0, 0, 0, 0);
    if (begin + k * step < chunks) weight[k] = static_cast<const uint4*>(from)[begin + k * step];
  }
}

template <typename T, Source kSource, bool kNorm, Quant kQuant, bool kOwnWeight, int V, bool kAhead>
__global__ void __launch_bounds__(kMaxHeldThreads, least_blocks(kSource, V, kAhead))
    held_rows(const __grid_constant__ RowArgs a) {
  constexpr int E = kElements<T>;
  __shared__ Exchange exchange;
  const Standing at = standing();
  Together together(exchange, at.rank, at.ranks);
  const int chunks = static_cast<int>(a.cols / E), step = at.ranks * blockDim.x;
  const int begin = at.rank * blockDim.x + threadIdx.x;
  const uint32_t pace = at.groups * blockDim.y, rows = static_cast<uint32_t>(a.rows);
  enter();

  Held<T, kSource, V> held;
  if constexpr (kAhead) held.load(a, at.group * blockDim.y + threadIdx.y, begin, step, chunks);
  uint4 weight[V];
  if constexpr (kOwnWeight && kAhead) load_weight(weight, a.weight, begin, step, chunks);
  float inverse = 0.0f;
  if constexpr (kQuant == Quant::fixed) inverse = *a.scale;

  // All rows of a block take part in its barriers, those behind the last row too.
  for (uint32_t first_row = at.group * blockDim.y; first_row < rows; first_row += pace) {
    const uint32_t row = first_row + threadIdx.y;
    const bool there = row < rows;
    Held<T, kSource, V> next;
    if constexpr (kAhead) {
      next.load(a, row + pace, begin, step, chunks);
    } else {
      held.load(a, row, begin, step, chunks);
      if constexpr (kOwnWeight && kSource == Source::plain) load_weight(weight, a.weight, begin, step, chunks);
      if constexpr (kOwnWeight && kSource != Source::plain) {
#pragma unroll
        for (int k = 0; k < V; ++k) {
          if (begin + k * step < chunks) announce(static_cast<const uint4*>(a.weight) + begin + k * step);
        }
      }
    }
    float total = 0.0f, most = 0.0f;
    T* sum = nullptr;
    if constexpr (kSource == Source::add) sum = static_cast<T*>(a.sum) + offset_of(a.sum_rows, row);
#pragma unroll
    for (int k = 0; k < V; ++k) {
      const int chunk = begin + k * step;
      if constexpr (kSource != Source::plain) held.first[k] = joined<T, kSource>(held.first[k], held.second[k]);
      if constexpr (kSource == Source::add) {
        if (there && chunk < chunks) *reinterpret_cast<uint4*>(sum + chunk * E) = held.first[k];
      }
      if constexpr (kNorm) {
        total += squares<T>(held.first[k]);
      } else {
        most = Largest::join(most, largest<T>(held.first[k]));
      }
      keep_packed(held.first[k]);
    }
    if constexpr (kOwnWeight && !kAhead && kSource != Source::plain) {  // in the registers of what was added
      load_weight(weight, a.weight, begin, step, chunks);
    }
    T* out = static_cast<T*>(a.out);
    uint8_t* codes = static_cast<uint8_t*>(a.out);
    const int64_t out_offset = offset_of(a.out_rows, row);
    if constexpr (kQuant == Quant::none) {
      out += out_offset;
    } else {
      codes += out_offset;
    }
    if constexpr (kNorm) {
      const float scale = rsqrtf(together.reduce<Sum>(total) * a.inverse_cols + a.epsilon);
      float reciprocal = 0.0f;
      if constexpr (kQuant == Quant::fixed) reciprocal = __fdiv_rn(1.0f, inverse);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const int chunk = begin + k * step;
        if (!there || chunk >= chunks) continue;
        uint4 y;
        if constexpr (kOwnWeight) {
          y = weighted<T>(held.first[k], scale, weight[k]);
        } else {
          y = weighted_by_any<T>(held.first[k], scale, a, int64_t{chunk} * E, E);
        }
        if constexpr (kQuant == Quant::none) {
          *reinterpret_cast<uint4*>(out + chunk * E) = y;
        } else if constexpr (kQuant == Quant::fixed) {
          store_codes<T>(codes + chunk * E, codes_of<T>(y, reciprocal));
        } else {
          held.first[k] = y;
          most = Largest::join(most, largest<T>(y));
          keep_packed(held.first[k]);
        }
      }
    }
    if constexpr (kQuant == Quant::per_row) {
      const float scale = scale_of_row(together.reduce<Largest>(most));
      if (there && begin == 0) a.row_scales[row] = scale;
      const float reciprocal = __fdiv_rn(1.0f, scale);
#pragma unroll
      for (int k = 0; k < V; ++k) {
        const int chunk = begin + k * step;
        if (there && chunk < chunks) store_codes<T>(codes + chunk * E, codes_of<T>(held.first[k], reciprocal));
      }
    }
    if constexpr (kAhead) held = next;
  }
}

// ---- rows read again ------------------------------------------------------------------------------------------------------

template <typename T, Source kSource, bool kNorm, Quant kQuant>
__global__ void __launch_bounds__(1024) read_again(const __grid_constant__ RowArgs a) {
  constexpr int E = kElements<T>;
  __shared__ Exchange exchange;
  const Standing at = standing();
  Together together(exchange, at.rank, at.ranks);
  const int64_t step = int64_t{at.ranks} * blockDim.x * E, begin = (int64_t{at.rank} * blockDim.x + threadIdx.x) * E;
  enter();
  float reciprocal = 0.0f;
  if constexpr (kQuant == Quant::fixed) reciprocal = __fdiv_rn(1.0f, *a.scale);

  const uint32_t rows = static_cast<uint32_t>(a.rows), pace = at.groups * blockDim.y;
  for (uint32_t first_row = at.group * blockDim.y; first_row < rows; first_row += pace) {
    const uint32_t row = first_row + threadIdx.y;
    const int64_t cols = row < rows ? a.cols : 0;
    const T* x = static_cast<const T*>(a.x) + offset_of(a.x_rows, row);
    const T* other = nullptr;
    T* sum = nullptr;
    if constexpr (kSource == Source::add) {
      other = static_cast<const T*>(a.residual) + offset_of(a.residual_rows, row);
      sum = static_cast<T*>(a.sum) + offset_of(a.sum_rows, row);
    } else if constexpr (kSource == Source::silu) {
      other = x + a.cols;
    }
    const bool x_aligned = is_aligned(x), other_aligned = is_aligned(other), sum_aligned = is_aligned(sum);
    const int64_t out_offset = offset_of(a.out_rows, row);
    T* out = static_cast<T*>(a.out) + (kQuant == Quant::none ? out_offset : 0);
    uint8_t* codes = static_cast<uint8_t*>(a.out) + out_offset;
    const bool out_aligned = is_aligned(out);

    auto read = [&](int64_t i) {  // what is normed and quantised; the sum was written by this thread
      if constexpr (kSource == Source::add) return load_piece(sum + i, cols - i, sum_aligned);
      const uint4 v = load_piece(x + i, cols - i, x_aligned);
      if constexpr (kSource == Source::silu) return joined<T, kSource>(v, load_piece(other + i, cols - i, other_aligned));
      return v;
    };

    float total = 0.0f, most = 0.0f;
    for (int64_t i = begin; i < cols; i += step) {
      uint4 v;
      if constexpr (kSource == Source::add) {
        v = joined<T, kSource>(load_piece(x + i, cols - i, x_aligned), load_piece(other + i, cols - i, other_aligned));
        store_piece(sum + i, v, cols - i, sum_aligned);
      } else {
        v = read(i);
      }
      if constexpr (kNorm) {
        total += squares<T>(v);
      } else {
        most = Largest::join(most, largest<T>(v));
      }
    }
    float scale = 0.0f;
    if constexpr (kNorm) {
      scale = rsqrtf(together.reduce<Sum>(total) * a.inverse_cols + a.epsilon);
      for (int64_t i = begin; i < cols; i += step) {
        const uint4 y = weighted_by_any<T>(read(i), scale, a, i, cols - i);
        if constexpr (kQuant == Quant::none) {
          store_piece(out + i, y, cols - i, out_aligned);
        } else if constexpr (kQuant == Quant::fixed) {
          store_codes_piece<T>(codes + i, codes_of<T>(y, reciprocal), cols - i);
        } else {
          float h[E];
          widen_vector<T>(y, h);
#pragma unroll
          for (int e = 0; e < E; ++e) {
            if (i + e < cols) most = Largest::join(most, fabsf(h[e]));
          }
        }
      }
    }
    if constexpr (kQuant == Quant::per_row) {
      const float row_scale = scale_of_row(together.reduce<Largest>(most));
      if (row < rows && begin == 0) a.row_scales[row] = row_scale;
      reciprocal = __fdiv_rn(1.0f, row_scale);
      for (int64_t i = begin; i < cols; i += step) {
        uint4 y = read(i);
        if constexpr (kNorm) y = weighted_by_any<T>(y, scale, a, i, cols - i);
        store_codes_piece<T>(codes + i, codes_of<T>(y, reciprocal), cols - i);
      }
    }
  }
}

// ---- choosing an instance -------------------------------------------------------------------------------------------------

using RowKernel = void (*)(RowArgs);

// What holds four vectors also takes rows of fewer; that costs registers, where another instance would cost compile time.
template <typename T, Source kSource, bool kNorm, Quant kQuant>
RowKernel held_kernel(int vectors, bool ahead, bool own_weight) {
  if constexpr (kNorm) {
    if (!own_weight) return held_rows<T, kSource, kNorm, kQuant, false, 4, false>;
  }
  if constexpr (kQuant != Quant::per_row) {
    if (ahead && vectors > 2) return held_rows<T, kSource, kNorm, kQuant, kNorm, 4, true>;
    if (ahead) return held_rows<T, kSource, kNorm, kQuant, kNorm, 2, true>;
  }
  if (vectors > 2) return held_rows<T, kSource, kNorm, kQuant, kNorm, 4, false>;
  return held_rows<T, kSource, kNorm, kQuant, kNorm, 2, false>;
}

constexpr int64_t kMostRows = int64_t{1} << 30;  // of one launch

template <typename T, Source kSource, bool kNorm, Quant kQuant>
void run_part(const char* op, const RowOp& what, const RowArgs& a, const Place& place) {
  constexpr int E = kElements<T>;
  constexpr Weight kOwn = sizeof(T) == 4 ? Weight::f32 : std::is_same_v<T, bf16> ? Weight::bf16 : Weight::f16;
  // A vector of x is E elements; the codes of one are E bytes.
  auto fits = [](const void* p, const Rows& rows, int64_t bytes) {
    bool fit = reinterpret_cast<uintptr_t>(p) % bytes == 0;
    for (int d = 0; d < rows.dims; ++d) fit = fit && (rows.size[d] <= 1 || rows.stride[d] % E == 0);
    return fit;
  };
  bool aligned = a.cols % E == 0 && fits(a.x, a.x_rows, 16);
  aligned = aligned && fits(a.out, a.out_rows, kQuant == Quant::none ? 16 : E);
  if constexpr (kSource == Source::add) {
    aligned = aligned && fits(a.residual, a.residual_rows, 16) && fits(a.sum, a.sum_rows, 16);
  }
  const bool own_weight = a.weight_type == kOwn && reinterpret_cast<uintptr_t>(a.weight) % 16 == 0;
  const DeviceFacts& facts = facts_of(place.device);
  const Plan plan = plan_rows(what, a.rows, (a.cols + E - 1) / E, aligned, facts);
  RowKernel kernel = read_again<T, kSource, kNorm, kQuant>;
  if (plan.vectors > 0) kernel = held_kernel<T, kSource, kNorm, kQuant>(plan.vectors, plan.ahead, own_weight);
  const int64_t groups = (a.rows + plan.rows_per_block - 1) / plan.rows_per_block;
  int64_t blocks = plan.blocks_per_sm > 0 ? int64_t{plan.blocks_per_sm} * facts.multiprocessors / plan.cluster : groups;
  blocks = blocks < 1 ? 1 : blocks < groups ? blocks : groups;
  constexpr int64_t kMostBlocks = 0x7fffffff / kMaxCluster;  // the kernels loop where there are more groups
  blocks = (blocks < kMostBlocks ? blocks : kMostBlocks) * plan.cluster;
  launch(op, kernel, dim3(static_cast<unsigned>(blocks)), dim3(plan.threads, plan.rows_per_block), plan, a, place);
}

template <typename T, Source kSource, bool kNorm, Quant kQuant>
void run_chosen(const char* op, const RowOp& what, RowArgs a, const Place& place) {
  if (a.rows <= kMostRows) return run_part<T, kSource, kNorm, kQuant>(op, what, a, place);
  auto step = [op](const Rows& rows) {
    if (rows.dims > 1) refuse(op, "more than 2^30 rows must be equally far apart; call .contiguous() first");
    return rows.dims > 0 ? rows.stride[0] * kMostRows : 0;
  };
  const int64_t x = step(a.x_rows), residual = step(a.residual_rows), sum = step(a.sum_rows), out = step(a.out_rows);
  for (int64_t left = a.rows; left > 0; left -= kMostRows) {
    a.rows = left < kMostRows ? left : kMostRows;
    run_part<T, kSource, kNorm, kQuant>(op, what, a, place);
    a.x = static_cast<const T*>(a.x) + x;
    a.residual = static_cast<const T*>(a.residual) + residual;
    a.sum = static_cast<T*>(a.sum) + sum;
    a.out = static_cast<char*>(a.out) + out * int64_t{kQuant == Quant::none ? sizeof(T) : 1};
    if (a.row_scales != nullptr) a.row_scales += kMostRows;
  }
}

template <typename T, Source kSource>
void run_norms(const char* op, const RowOp& what, const RowArgs& a, const Place& place) {
  switch (what.quant) {
    case Quant::none:
      return run_chosen<T, kSource, true, Quant::none>(op, what, a, place);
    case Quant::fixed:
      return run_chosen<T, kSource, true, Quant::fixed>(op, what, a, place);
    case Quant::per_row:
      return run_chosen<T, kSource, true, Quant::per_row>(op, what, a, place);
  }
}

}  // namespace
}  // namespace irframework_vllm_c::cuda
