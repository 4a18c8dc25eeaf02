// Owns the instances of the element kernels for float32.
#include "elements.cuh"

namespace irframework_vllm_c::cuda {

void run_elements_f32(const char* op, Map map, const ElementArgs& args, const Place& place) {
  run_elements_of<float>(op, map, args, place);
}

}  // namespace irframework_vllm_c::cuda
