// AVX-512 F, BW, DQ and VL (Skylake-SP, Zen 4 and later).
#define IRF_NAMESPACE avx512
#define IRF_ISA_NAME "avx512"
#define IRF_WIDTH 16
#define IRF_TABLE kAvx512Kernels
#include "kernels_body.h"
