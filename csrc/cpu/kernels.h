// Owns the interface to the kernels that are compiled once per instruction set: a table of functions over the structs of
// common/arguments.h. No torch header, no std template: what is compiled with AVX-512 flags must not leave behind an
// inline function that the linker could pick for everybody.
#pragma once
#include <cstdint>

#include "../common/arguments.h"

namespace irframework_vllm_c {

// Each function works on rows (or tokens) [begin, end); a row is computed the same way whatever the range is. `scratch`
// holds one row in the type of x where results are quantised in a second pass: by the norms with scales of their own, by
// gated activations always; else it may be null.
struct Kernels {
  const char* isa;
  void (*norm)(const NormArgs&, int64_t begin, int64_t end, void* scratch);
  void (*gated)(const GateArgs&, int64_t begin, int64_t end, void* scratch);
  void (*quantised)(const QuantArgs&, int64_t begin, int64_t end, void* scratch);
  void (*rotary)(const RotaryArgs&, int64_t begin, int64_t end, void* scratch);
  void (*cached)(const CacheArgs&, int64_t begin, int64_t end, void* scratch);
  void (*attended)(const AttentionArgs&, int64_t begin, int64_t end, void* scratch);
  void (*joined_parts)(const AttentionArgs&, int64_t begin, int64_t end, void* scratch);
  void (*pointwise)(const PointwiseArgs&, int64_t begin, int64_t end, void* scratch);
  void (*group_quantised)(const GroupQuantArgs&, int64_t begin, int64_t end, void* scratch);
  void (*magnitudes)(const QuantArgs&, int64_t begin, int64_t end, void* scratch);  // writes them to `scales`
  float (*scale_of_all)(const float* magnitudes, int64_t count);
  void (*dequantised)(const DequantArgs&, int64_t begin, int64_t end, void* scratch);
  void (*head_angles)(const HeadAnglesArgs&, int64_t begin, int64_t end, void* scratch);
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
