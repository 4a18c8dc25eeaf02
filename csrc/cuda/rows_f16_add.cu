// Owns the instances of the row kernels for float16, of x + residual.
#include "rows.cuh"

namespace irframework_vllm_c::cuda {

void run_rows_f16_add(const char* op, const RowOp& what, const RowArgs& a, const Place& place) {
  run_norms<f16, Source::add>(op, what, a, place);
}

}  // namespace irframework_vllm_c::cuda
