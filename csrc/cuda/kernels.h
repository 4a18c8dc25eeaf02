// Owns the interface between the torch side (ops.cpp), the kernels (*.cu): plain
// argument structs and launchers. No torch header and no CUDA header, so that each side compiles without the other's.
#pragma once
#include <cstdint>

#include "../common/arguments.h"

namespace irframework_vllm_c::cuda {

// Where a launch goes: the device of the tensors, which is the current one by then, and torch's stream on it.
struct Place {
  int device;
  void* stream;  // a cudaStream_t
};

// ---- rows: what has to see a whole row before it can write it -----------------------------------------------------------

enum class Source : int32_t {
  plain,  // the row is x
  add,    // the row is x + residual, rounded, which is written to `sum`
  silu,   // the row is silu(gate) * up, where x is [gate, up]
};
enum class Quant : int32_t {
  none,
  fixed,    // codes of the scale in `scale`
  per_row,  // codes of a scale of the row's own, which is written to `row_scales`
};
enum class Weight : int32_t { f32 = 0, bf16 = 1, f16 = 2, none = 3 };

struct RowArgs {
  const void* x;
  const void* residual;
  void* sum;           // may be `residual`
  const void* weight;
  const float* scale;
  void* out;           // may be `x` when Source::add
  float* row_scales;   // one per row
  Rows x_rows;
  Rows residual_rows;
  Rows sum_rows;
  Rows out_rows;
  int64_t rows;
  int64_t cols;        // of the result
  float epsilon;
  float inverse_cols;
  Weight weight_type;
};

struct RowOp {
  Type type;
  Source source;
  bool norm;  // with Source::silu or Quant::per_row alone there is none
  Quant quant;
};

void run_rows(const char* op, const RowOp& what, const RowArgs& args, const Place& place);

// ---- elements: what is written as it is read --------------------------------------------------------------------------

enum class Map : int32_t { quant, silu, gelu_erf, gelu_tanh, silu_quant };

struct ElementArgs {
  const void* x;  // rows of cols, or of 2 * cols for the gated maps
  void* out;      // contiguous rows of cols
  const float* scale;
  Rows x_rows;
  int64_t rows;
  int64_t cols;
};

void run_elements(const char* op, Type type, Map map, const ElementArgs& args, const Place& place);

// ---- rotary embedding ---------------------------------------------------------------------------------------------------

void run_rotary(const char* op, const RotaryArgs& args, int64_t tokens, const Place& place);

// ---- devices ------------------------------------------------------------------------------------------------------------

// Torch has a CUDA runtime of its own; makes this one mean the same device.
void use_device(const char* op, int device);

// Throws what the op says when CUDA refuses something.
[[noreturn]] void refuse(const char* op, const char* what);

}  // namespace irframework_vllm_c::cuda
