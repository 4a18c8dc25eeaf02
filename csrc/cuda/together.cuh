// Owns how the threads of a row come to one number, a sum or a maximum: within a warp, a block, or a cluster of blocks.
// Does not know what is added up. Included by rows.cuh.
#pragma once
#include "device.cuh"
#include "plan.h"

namespace irframework_vllm_c::cuda {
namespace {

struct Sum {
  static __device__ __forceinline__ float join(float a, float b) { return a + b; }
};
// Of numbers that are not negative. As integers their order is the same, and NaN is the largest.
struct Largest {
  static __device__ __forceinline__ float join(float a, float b) {
    return __uint_as_float(max(__float_as_uint(a), __float_as_uint(b)));
  }
};

// A block is (threads of one row, rows); a cluster of blocks shares one row. Two buffers take turns, so that one barrier
// in each reduction is enough.
struct Exchange {
  float of_warp[2][32];
  float of_block[2][kMaxCluster];
};

class Together {
 public:
  __device__ __forceinline__ Together(Exchange& exchange, int rank, int ranks)
      : exchange_(exchange), rank_(rank), ranks_(ranks) {}

  template <typename Op>
  __device__ __forceinline__ float reduce(float v) {
    for (unsigned apart = min(blockDim.x, 32u) / 2; apart > 0; apart /= 2) {
      v = Op::join(v, __shfl_xor_sync(0xffffffff, v, apart));
    }
    if (blockDim.x <= 32) return v;
    const unsigned warps = blockDim.x / 32, lane = threadIdx.x % 32;
    float* of_warp = exchange_.of_warp[turn_] + threadIdx.y * warps;
    if (lane == 0) of_warp[threadIdx.x / 32] = v;
    __syncthreads();
    v = lane < warps ? of_warp[lane] : 0.0f;
#pragma unroll
    for (int apart = 16; apart > 0; apart /= 2) v = Op::join(v, __shfl_xor_sync(0xffffffff, v, apart));
#if __CUDA_ARCH__ >= 900
    if (ranks_ > 1) v = across_blocks<Op>(v);
#endif
    turn_ ^= 1;
    return v;
  }

 private:
#if __CUDA_ARCH__ >= 900
  template <typename Op>
  __device__ __forceinline__ float across_blocks(float v) {
    float* of_block = exchange_.of_block[turn_];
    if (threadIdx.x < ranks_) {
      uint32_t mine = static_cast<uint32_t>(__cvta_generic_to_shared(of_block + rank_)), theirs;
      asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(theirs) : "r"(mine), "r"(threadIdx.x));
      asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(theirs), "f"(v) : "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
    v = of_block[0];
    for (int other = 1; other < ranks_; ++other) v = Op::join(v, of_block[other]);
    return v;
  }
#endif

  Exchange& exchange_;
  int rank_, ranks_;
  int turn_ = 0;
};

// Where this block stands: which group of rows, of how many that run at a time, and which part of each row.
struct Standing {
  uint32_t group, groups;
  int rank, ranks;
};

__device__ __forceinline__ Standing standing() {
#if __CUDA_ARCH__ >= 900
  uint32_t group, groups, rank, ranks;
  asm("mov.u32 %0, %%clusterid.x;" : "=r"(group));
  asm("mov.u32 %0, %%nclusterid.x;" : "=r"(groups));
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(ranks));
  if (ranks > 1) {  // nobody writes to a block's memory before the block is there
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
  }
  return {group, groups, static_cast<int>(rank), static_cast<int>(ranks)};
#else
  return {blockIdx.x, gridDim.x, 0, 1};
#endif
}

}  // namespace
}  // namespace irframework_vllm_c::cuda
