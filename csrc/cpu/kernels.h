// Owns the interface between the torch side (ops.cpp) and the kernels that are compiled once per instruction set:
// plain argument structs and a table of functions. No torch header, no std template: what is compiled with AVX-512
// flags must not leave behind an inline function that the linker could pick for everybody.
#pragma once
#include <cstdint>

#include "../common/rows.h"

namespace irframework_vllm_c {

struct NormArgs {
  const void* x;
  void* residual;      // fused_add_rms_norm only: read, and written with x + residual
  const void* weight;  // may be null
  void* out;           // rms_norm: fresh and contiguous; fused_add_rms_norm: x itself
  Rows x_rows;
  Rows residual_rows;
  Rows out_rows;
  int64_t cols;
  float epsilon;
  Type type;
  Type weight_type;
  bool stream;       // write around the caches: the output is larger than they are
};

enum class Gate : int32_t { silu, gelu_erf, gelu_tanh };

struct GateArgs {
  const void* x;  // rows of 2 * cols
  void* out;      // contiguous rows of cols
  Rows x_rows;
  int64_t cols;
  Gate gate;
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

// Each function works on rows (or tokens) [begin, end); a row is computed the same way whatever the range is.
struct Kernels {
  const char* isa;
  void (*rms_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*fused_add_rms_norm)(const NormArgs&, int64_t begin, int64_t end);
  void (*gated)(const GateArgs&, int64_t begin, int64_t end);
  void (*rotary)(const RotaryArgs&, int64_t begin, int64_t end);
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
