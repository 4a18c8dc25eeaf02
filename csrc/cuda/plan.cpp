// Owns the choice of a launch, for every kernel. Does not launch. The numbers were chosen on an H200 with
// benchmarks/cuda_plans.py, which tries the others through `irframework_vllm_c_use_plan`.
#include "plan.h"

#include <atomic>

namespace irframework_vllm_c::cuda {
namespace {

// What takes the place of a plan's numbers in experiments; -1 keeps them.
struct Changes {
  std::atomic<int> threads{-1}, vectors{-1}, rows_per_block{-1}, cluster{-1}, blocks_per_sm{-1}, ahead{-1}, overlap{-1};
} changes;

void change(int& number, const std::atomic<int>& to) {
  const int value = to.load(std::memory_order_relaxed);
  if (value >= 0) number = value;
}

Plan changed(Plan plan) {
  change(plan.threads, changes.threads);
  change(plan.vectors, changes.vectors);
  change(plan.rows_per_block, changes.rows_per_block);
  change(plan.cluster, changes.cluster);
  change(plan.blocks_per_sm, changes.blocks_per_sm);
  change(plan.ahead, changes.ahead);
  change(plan.overlap, changes.overlap);
  return plan;
}

int up_to_warps(int64_t threads) { return static_cast<int>((threads + 31) / 32 * 32); }

int power_of_two(int64_t least) {
  int n = 4;
  while (n < least) n *= 2;
  return n;
}

Plan default_rows(Source source, int64_t rows, int64_t chunks, bool aligned, const DeviceFacts& facts) {
  Plan plan{32, 2, 1, 1, 0, 0, 0};
  if (chunks <= 32) {
    plan.threads = power_of_two(chunks);
  } else if (chunks <= 64) {
    plan.threads = 32;
  } else if (chunks <= 1024 && (source == Source::silu || chunks < 256)) {
    plan.threads = up_to_warps((chunks + 1) / 2);  // norms of all kinds add up alike: fused gives the bits of unfused
  } else if (chunks <= kMaxHeldThreads * 4) {
    plan.vectors = 4;
    plan.threads = up_to_warps((chunks + 3) / 4);
  } else {
    plan.vectors = 4;
    plan.threads = kMaxHeldThreads;
    while (facts.capability >= 90 && plan.cluster < kMaxCluster && plan.cluster * kMaxHeldThreads * 4 < chunks) {
      plan.cluster *= 2;
    }
    if (plan.cluster * kMaxHeldThreads * 4 < chunks) {
      plan.vectors = 0;
      plan.threads = kMaxThreads;
    }
  }
  if (!aligned) plan.vectors = 0;
  if (plan.threads < 128) {  // several rows in a block, but not so many that multiprocessors stay idle
    int64_t most = rows / facts.multiprocessors;
    if (most * plan.threads < 32) most = 32 / plan.threads;
    plan.rows_per_block = 128 / plan.threads;
    while (plan.rows_per_block > most) plan.rows_per_block /= 2;
    if (plan.rows_per_block < 1) plan.rows_per_block = 1;
  }
  return plan;
}

}  // namespace

bool can_run_rows(const Plan& plan, const RowOp& what, int64_t chunks, bool aligned, const DeviceFacts& facts) {
  const int all = plan.threads * plan.rows_per_block;
  const bool whole = plan.threads >= 32 ? plan.threads % 32 == 0
                                        : plan.threads >= 4 && (plan.threads & (plan.threads - 1)) == 0;
  if (!whole || plan.rows_per_block < 1 || all % 32 != 0 || all > kMaxThreads) return false;
  if (plan.cluster < 1 || plan.cluster > kMaxCluster || (plan.cluster & (plan.cluster - 1)) != 0) return false;
  // A cluster hands its numbers on behind the barrier of a block with one row of more than a warp.
  if (plan.cluster > 1 && (facts.capability < 90 || plan.rows_per_block > 1 || plan.threads <= 32)) return false;
  if (plan.vectors == 0) return plan.ahead == 0;
  if (!aligned || (plan.vectors != 1 && plan.vectors != 2 && plan.vectors != 4)) return false;
  if (plan.ahead != 0 && (what.quant == Quant::per_row || plan.blocks_per_sm == 0)) return false;
  if (all > kMaxHeldThreads) return false;
  return int64_t{plan.threads} * plan.vectors * plan.cluster >= chunks;
}

Plan plan_rows(const RowOp& what, int64_t rows, int64_t chunks, bool aligned, const DeviceFacts& facts) {
  const Plan plan = default_rows(what.source, rows, chunks, aligned, facts), other = changed(plan);
  return can_run_rows(other, what, chunks, aligned, facts) ? other : plan;
}

Plan plan_elements(bool aligned) {
  const Plan plan{128, 1, 1, 1, 0, 0, 0};
  Plan other = changed(plan);
  other.rows_per_block = other.cluster = 1;  // they are about rows
  const bool fits = other.threads % 32 == 0 && other.threads >= 32 && other.threads <= 512 && other.vectors >= 1 &&
                    other.vectors <= 4 && other.vectors != 3 && (aligned || other.vectors == 1);
  return fits ? other : plan;
}

}  // namespace irframework_vllm_c::cuda

namespace cuda = irframework_vllm_c::cuda;

#define IRF_EXPORT extern "C" __attribute__((visibility("default")))

// Changes numbers of every plan of this process from now on; -1 is the kernels' own choice. A changed plan that cannot
// run a call is not used for it. For tests and experiments: results may differ in the order of a sum.
IRF_EXPORT void irframework_vllm_c_use_plan(int threads, int vectors, int rows_per_block, int cluster, int blocks_per_sm,
                                            int ahead, int overlap) {
  cuda::changes.threads = threads;
  cuda::changes.vectors = vectors;
  cuda::changes.rows_per_block = rows_per_block;
  cuda::changes.cluster = cluster;
  cuda::changes.blocks_per_sm = blocks_per_sm;
  cuda::changes.ahead = ahead;
  cuda::changes.overlap = overlap;
}
