// Owns launching a kernel: attributes, and the words for what CUDA refuses. Nothing here waits for the device or allocates.
#pragma once
#include <cuda_runtime.h>

#include <cstdint>
#include <string>

#include "kernels.h"
#include "plan.h"

namespace irframework_vllm_c::cuda {

inline void check(const char* op, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // it is reported here, and must not be found again by somebody else
  refuse(op, (std::string("CUDA refused the launch: ") + cudaGetErrorString(error) + " (" + cudaGetErrorName(error) + ")")
                 .c_str());
}

template <typename Args>
void launch(const char* op, void (*kernel)(Args), dim3 grid, dim3 block, const Plan& plan,
            const Args& args, const Place& place) {
  cudaLaunchAttribute attributes[2];
  cudaLaunchConfig_t config{};
  config.gridDim = grid;
  config.blockDim = block;
  config.stream = static_cast<cudaStream_t>(place.stream);
  config.attrs = attributes;
  if (facts_of(place.device).capability >= 90) {
    if (plan.overlap) {
      attributes[config.numAttrs].id = cudaLaunchAttributeProgrammaticStreamSerialization;
      attributes[config.numAttrs++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (plan.cluster > 1) {
      attributes[config.numAttrs].id = cudaLaunchAttributeClusterDimension;
      attributes[config.numAttrs++].val.clusterDim = {static_cast<unsigned>(plan.cluster), 1, 1};
    }
  }
  check(op, cudaLaunchKernelEx(&config, kernel, args));
}

}  // namespace irframework_vllm_c::cuda
