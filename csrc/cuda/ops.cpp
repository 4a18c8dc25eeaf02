// Owns which functions the torch ops of the namespace irframework_vllm_c are on CUDA devices. Their schemas, for every
// device, are in cpu/ops.cpp: the CPU library is loaded first.
#include "../common/ops.h"

#include <torch/csrc/stable/library.h>

STABLE_TORCH_LIBRARY_IMPL(irframework_vllm_c, CUDA, m) { irframework_vllm_c::implement(m); }

// The architectures that this library holds code for, as `80,90,100`; the last also as PTX.
extern "C" __attribute__((visibility("default"))) const char* irframework_vllm_c_cuda_architectures() {
  return IRFRAMEWORK_CUDA_ARCHITECTURES;
}
