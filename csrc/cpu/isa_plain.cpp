// Baseline of the target: SSE2 on x86-64, NEON on arm64.
#define IRF_NAMESPACE plain
#define IRF_ISA_NAME "plain"
#define IRF_WIDTH 4
#define IRF_TABLE kPlainKernels
#include "kernels_body.h"
