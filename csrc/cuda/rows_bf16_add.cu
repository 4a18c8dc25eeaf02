// Owns the instances of the row kernels for bfloat16, of x + residual.
#include "rows.cuh"

namespace irframework_vllm_c::cuda {

void run_rows_bf16_add(const char* op, const RowOp& what, const RowArgs& a, const Place& place) {
  run_norms<bf16, Source::add>(op, what, a, place);
}

}  // namespace irframework_vllm_c::cuda
