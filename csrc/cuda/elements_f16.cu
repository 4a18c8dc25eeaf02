// Owns the instances of the element kernels for float16.
#include "elements.cuh"

namespace irframework_vllm_c::cuda {

void run_elements_f16(const char* op, Map map, const ElementArgs& args, const Place& place) {
  run_elements_of<f16>(op, map, args, place);
}

}  // namespace irframework_vllm_c::cuda
