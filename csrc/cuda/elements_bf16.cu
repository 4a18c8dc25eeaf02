// Owns the instances of the element kernels for bfloat16.
#include "elements.cuh"

namespace irframework_vllm_c::cuda {

void run_elements_bf16(const char* op, Map map, const ElementArgs& args, const Place& place) {
  run_elements_of<bf16>(op, map, args, place);
}

}  // namespace irframework_vllm_c::cuda
