// Owns the order in which one instruction set's kernels are put together, and its table. The kernels are written once,
// over vec.h, one file per family. Included by isa_*.cpp, which set IRF_NAMESPACE, IRF_WIDTH, IRF_TABLE and IRF_ISA_NAME
// and are compiled with the flags of their instruction set.
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels.h"

namespace irframework_vllm_c {
namespace IRF_NAMESPACE {

#include "vec.h"
#include "vec_fp8.h"

#include "row_walk.h"
#include "row_sinks.h"
#include "group_codes.h"

#include "attention_kernels.h"
#include "cache_kernels.h"
#include "gated_kernels.h"
#include "norm_kernels.h"
#include "pointwise_kernels.h"
#include "quantisation_kernels.h"
#include "rotary_kernels.h"
#include "head_angles_kernels.h"

}  // namespace IRF_NAMESPACE

const Kernels IRF_TABLE = {IRF_ISA_NAME, IRF_NAMESPACE::norm, IRF_NAMESPACE::gated, IRF_NAMESPACE::quantised,
                           IRF_NAMESPACE::rotary, IRF_NAMESPACE::cached, IRF_NAMESPACE::attended,
                           IRF_NAMESPACE::joined_parts, IRF_NAMESPACE::pointwise, IRF_NAMESPACE::group_quantised,
                           IRF_NAMESPACE::magnitudes, IRF_NAMESPACE::scale_of_all, IRF_NAMESPACE::dequantised,
                           IRF_NAMESPACE::head_angles};

}  // namespace irframework_vllm_c
