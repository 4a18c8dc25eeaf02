// Owns what the torch side (*_ops.cpp) tells the kernels of every device: plain argument structs. No torch header, no std
// template, because units compiled for one instruction set or for a GPU include it too.
#pragma once
#include <cstdint>

#include "rows.h"

namespace irframework_vllm_c {

// What becomes of a result: it is stored, or made into codes of float8_e4m3fn with a given scale (`scale`, one number) or
// with a scale of its own for each row (written to `scales`).
enum class Quantisation : int32_t { none, fixed, dynamic };

struct NormArgs {
  const void* x;
  const void* residual;  // null: no addition
  void* sum;             // x + residual; may be the residual itself
  const void* weight;    // may be null
  void* out;             // the norm, or its codes; the norm may be x itself
  const float* scale;
  float* scales;
  Rows x_rows;
  Rows residual_rows;
  Rows sum_rows;
  Rows out_rows;
  int64_t cols;
  float epsilon;
  Type type;
  Type weight_type;
  Quantisation quantisation;
  bool stream;  // the CPU only: write around the caches
};

enum class Gate : int32_t { silu, gelu_erf, gelu_tanh };

struct GateArgs {
  const void* x;  // rows of 2 * cols
  void* out;      // contiguous rows of cols, or of codes
  const float* scale;
  float* scales;
  Rows x_rows;
  int64_t cols;
  Gate gate;  // only silu is quantised
  Type type;
  Quantisation quantisation;
  bool stream;  // the CPU only: write around the caches
};

// Row r is written to codes[r * cols]; `numel` bounds the last row, where x is cut into rows regardless of its shape.
struct QuantArgs {
  const void* x;
  uint8_t* codes;
  const float* scale;  // null: one scale for each row
  float* scales;
  Rows x_rows;
  int64_t cols;
  int64_t numel;
  Type type;
  bool stream;  // the CPU only: write around the caches
};

// One of query and key: `heads` heads of `head_size` for each token.
struct RotaryTensor {
  const void* in;
  void* out;  // contiguous
  Rows token_rows;
  int64_t heads;
  int64_t head_stride;
};

struct RotaryArgs {
  const int64_t* positions;  // one per token
  const void* cache;  // [max_position, rotary_dim], first half cos, second half sin
  int64_t cache_rows;
  int64_t cache_stride;
  int64_t rotary_dim;
  int64_t head_size;
  RotaryTensor tensors[2];
  int tensor_count;
  bool neox;
  Type type;
  Type cache_type;
};

// One of key and value: `heads` heads of `head_bytes` bytes for each token, and the cache, in which a slot's lie side by
// side. Strides are in bytes.
struct CachedTensor {
  const char* in;
  char* out;
  int64_t token_stride;
  int64_t heads;
  int64_t head_stride;
  int64_t head_bytes;
};

struct CacheArgs {
  CachedTensor tensors[2];
  const void* slots;  // one per token, int64 or int32
  bool wide_slots;
  int64_t slot_count;
};

}  // namespace irframework_vllm_c
