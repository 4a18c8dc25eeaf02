// Owns the instances of the row kernels for float16, of x as it is.
#include "rows.cuh"

namespace irframework_vllm_c::cuda {

void run_rows_f16_plain(const char* op, const RowOp& what, const RowArgs& a, const Place& place) {
  if (what.norm) return run_norms<f16, Source::plain>(op, what, a, place);
  if (what.source == Source::silu) return run_chosen<f16, Source::silu, false, Quant::per_row>(op, what, a, place);
  run_chosen<f16, Source::plain, false, Quant::per_row>(op, what, a, place);
}

}  // namespace irframework_vllm_c::cuda
