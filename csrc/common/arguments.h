// Owns what the torch side (*_ops.cpp) tells the kernels of every device: plain argument structs. No torch header, no std
// template, because units compiled for one instruction set or for a GPU include it too.
#pragma once
#include <cstdint>

#include "rows.h"

namespace irframework_vllm_c {

// What becomes of a result: it is stored, or made into codes of float8_e4m3fn with a given scale (`scale`, one number) or
// with scales of its own (written to `scales`): one for each row, or where there are groups one for each of them.
enum class Quantisation : int32_t { none, fixed, dynamic };

// Each `size` elements of a row have a scale of their own: the CPU only. `tokens` rows make a matrix.
struct Groups {
  int64_t size;  // 0: no groups
  int64_t tokens;
  bool column_major;  // scales[matrix][group][token], else scales[matrix][token][group]
  bool power_of_two;
};

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
  Groups groups;
  bool one_plus;  // the CPU only: scale by 1 + weight, rounding only at the end
  bool stream;    // the CPU only: write around the caches
};

enum class Gate : int32_t { silu, gelu_erf, gelu_tanh };

struct GateArgs {
  const void* x;  // rows of 2 * cols
  void* out;      // contiguous rows of cols, or of codes
  const float* scale;
  float* scales;
  Rows x_rows;
  int64_t cols;
  Gate gate;  // on GPUs only silu is quantised
  Type type;
  Quantisation quantisation;
  Groups groups;
  bool stream;  // the CPU only: write around the caches
};

// The activations that only the CPU has kernels for: those of one element each, then those with a gate, of which the last
// have it in a tensor of its own.
enum class Pointwise : int32_t {
  gelu_tanh,
  quick_gelu,
  relu2,
  xielu,
  mul_and_silu,
  fatrelu_and_mul,
  swigluoai_and_mul,
  gelu_and_mul_sparse,
  silu_mul,
  gelu_mul,
};

constexpr bool has_gate(Pointwise function) { return function >= Pointwise::mul_and_silu; }

// Row r is written to out[r * cols]; `numel` of the results bounds the last row, where x is cut into rows regardless of its
// shape.
struct PointwiseArgs {
  const void* x;   // rows of cols, or of 2 * cols where a gate is in one tensor with what it multiplies
  const void* up;  // what a gate in a tensor of its own multiplies, else null
  void* out;
  Rows x_rows;
  Rows up_rows;
  int64_t cols;
  int64_t numel;
  Pointwise function;
  Type type;
  float first;   // beta; threshold; alpha; how many standard deviations the cutoff is above the mean
  float second;  // epsilon; limit
  bool tanh;     // of gelu_and_mul_sparse and gelu_mul: the approximation
  const void* alphas[2];  // of xielu, positive and negative, one number each
  Type alpha_types[2];
  bool stream;
};

// What codes are: numbers of float8_e4m3fn, or int8.
enum class Coding : int32_t { e4m3, int8 };

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
  Coding coding;  // the CPU only: int8, with a scale for each row
  bool stream;    // the CPU only: write around the caches
};

struct GroupQuantArgs {
  const void* x;
  uint8_t* codes;
  float* scales;
  Rows x_rows;
  int64_t cols;
  Groups groups;
  Type type;
  bool stream;
};

// The way back, the CPU only: with one scale, or `groups` of them for each row, laid out as those of Groups.
struct DequantArgs {
  const uint8_t* codes;
  void* out;
  const float* scales;
  Rows code_rows;
  int64_t cols;
  int64_t groups;  // 0: one scale
  int64_t tokens;
  bool column_major;
  Coding coding;
  Type type;  // of the result
  bool stream;
};

// One of query and key: `heads` heads of `head_size` for each token.
struct RotaryTensor {
  const void* in;
  const void* weight;  // of the norm; may be null
  Type weight_type;
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
  bool normed;  // the CPU only: each head is normed, and rounded, before it is rotated
  float epsilon;
  bool neox;
  Type type;
  Type cache_type;
};

// Heads that are rotated by cosines and sines of whole heads, the CPU only.
struct HeadAnglesArgs {
  RotaryTensor x;
  const void* cos;
  const void* sin;
  Rows cos_rows;  // one for each token, in the dimensions of tokens; a stride may be 0
  Rows sin_rows;
  int64_t head_size;
  Type type;
  Type angle_type;
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
};

// Keys or values, [blocks, block_size, heads, size]. Strides are in elements.
struct AttendedTensor {
  const void* data;
  int64_t block_stride;
  int64_t row_stride;
  int64_t head_stride;
};

// Some of the keys, [first, last), of one token's sequence. `start`: with a block table where the sequence's row of it
// starts, else the sequence's first key. `part`: where the sums go for want of the other spans; less than 0: the span is all.
struct AttentionSpan {
  int64_t token;
  int64_t start;
  int64_t first;
  int64_t last;
  int64_t part;
};

// The spans of one token, from part `part` on.
struct AttentionJoin {
  int64_t token;
  int64_t part;
  int64_t count;
};

struct AttentionArgs {
  const void* query;  // `kv_heads * group` heads for each token
  AttendedTensor keys;
  AttendedTensor values;
  void* out;  // contiguous
  const AttentionSpan* spans;
  const AttentionJoin* joins;
  float* parts;          // `part_width` numbers for each part: sums of values, then the highest score and the total
  const int32_t* table;  // null: all keys lie side by side, as if in one block
  const void* sinks;     // may be null
  int64_t token_stride;
  int64_t head_stride;
  int64_t block_size;
  int64_t sink_stride;
  int64_t kv_heads;
  int64_t group;
  int64_t head_size;
  int64_t value_size;
  int64_t query_width;  // the sizes rounded up to whole vectors
  int64_t value_width;
  int64_t part_width;
  float scale;
  float soft_cap;  // 0: none
  Type type;
  Type sink_type;
};

}  // namespace irframework_vllm_c
