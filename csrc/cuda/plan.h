// Owns what a launch looks like: see plan.cpp.
#pragma once
#include <cstdint>

#include "kernels.h"

namespace irframework_vllm_c::cuda {

struct DeviceFacts {
  int multiprocessors;
  int capability;  // 90 is 9.0
};

// Asked once per device.
const DeviceFacts& facts_of(int device);

struct Plan {
  int threads;         // of a block, for one row (rows) or in all (elements)
  int vectors;         // of 16 bytes that a thread holds at a time; 0 (rows): they are read again instead of held
  int rows_per_block;  // rows only
  int cluster;         // blocks for one row, rows only
  int blocks_per_sm;   // 0: a block for each group of rows; else so many, that take one group after the other
  int ahead;           // 1: such a block reads its next rows before it is done with these
  int overlap;         // 1: the launch may begin while the kernel before it ends; behind matrix products that costs time
};

constexpr int kMaxCluster = 8;
constexpr int kMaxHeldThreads = 512;  // of a block that holds its rows
constexpr int kMaxThreads = 1024;     // of any other

// How rows of `chunks` vectors are computed. `aligned`: all rows can be read and written as vectors. Threads, vectors and
// cluster decide the order of a sum; they depend on the row's length alone, so a row's result depends on the row alone.
Plan plan_rows(const RowOp& what, int64_t rows, int64_t chunks, bool aligned, const DeviceFacts& facts);
Plan plan_elements(bool aligned);

// Whether there is an instance for a plan, and it covers a row.
bool can_run_rows(const Plan& plan, const RowOp& what, int64_t chunks, bool aligned, const DeviceFacts& facts);

}  // namespace irframework_vllm_c::cuda
