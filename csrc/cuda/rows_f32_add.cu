// Owns the instances of the row kernels for float32, of x + residual.
#include "rows.cuh"

namespace irframework_vllm_c::cuda {

void run_rows_f32_add(const char* op, const RowOp& what, const RowArgs& a, const Place& place) {
  run_norms<float, Source::add>(op, what, a, place);
}

}  // namespace irframework_vllm_c::cuda
