// Owns the interface between the torch side (*_ops.cpp) and the kernels that are compiled once per instruction set:
// plain argument structs and a table of functions. No torch header, no std template: what is compiled with AVX-512
// flags must not leave behind an inline function that the linker could pick for everybody.
#pragma once
#include <cstdint>

#include "../common/rows.h"

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
  bool stream;  // write around the caches: the output is larger than they are
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
  bool stream;
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
  bool stream;
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
  int64_t cache_stride;
  int64_t rotary_dim;
  int64_t head_size;
  RotaryTensor tensors[2];
  int tensor_count;
  bool neox;
  Type type;
  Type cache_type;
};

// Each function works on rows (or tokens) [begin, end); a row is computed the same way whatever the range is. `scratch`
// holds one row of what is quantised with a scale of its own, in the type of x; else it may be null.
struct Kernels {
  const char* isa;
  void (*norm)(const NormArgs&, int64_t begin, int64_t end, void* scratch);
  void (*gated)(const GateArgs&, int64_t begin, int64_t end, void* scratch);
  void (*quantised)(const QuantArgs&, int64_t begin, int64_t end, void* scratch);
  void (*rotary)(const RotaryArgs&, int64_t begin, int64_t end, void* scratch);
};

extern const Kernels kPlainKernels;
#if defined(IRFRAMEWORK_X86)
extern const Kernels kAvx2Kernels;
extern const Kernels kAvx512Kernels;
#endif

// The table for this processor, or the one that IRFRAMEWORK_VLLM_C_ISA names. Throws std::runtime_error for a name
// that is unknown or that this processor cannot run.
const Kernels& active_kernels();

}  // namespace irframework_vllm_c
