// AVX2 with FMA and F16C (Haswell, 2013, and later).
#define IRF_NAMESPACE avx2
#define IRF_ISA_NAME "avx2"
#define IRF_WIDTH 8
#define IRF_TABLE kAvx2Kernels
#include "kernels_body.h"
