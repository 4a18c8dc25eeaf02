// What a kernel of few rows can reach at best: time per kernel inside a CUDA graph of 200 kernels in a row, for one that
// does nothing, one that only stores, one that copies, and the shortest norm of rows (a load, one barrier, a store).
// Each also with programmatic dependent launch (pdl), where a kernel starts before the one in front of it has ended.
//
//     nvcc -O3 -std=c++17 -arch=sm_90 benchmarks/launch_floor.cu -o launch_floor && ./launch_floor
#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>
#define CHECK(x) do { cudaError_t err_ = (x); if (err_ != cudaSuccess) { printf("%s: %s\n", #x, cudaGetErrorString(err_)); exit(1);} } while (0)

template <bool PDL> __device__ void enter() { if constexpr (PDL) { cudaTriggerProgrammaticLaunchCompletion(); cudaGridDependencySynchronize(); } }

template <bool PDL> __global__ void empty(const uint4* x, uint4* y, int v) { enter<PDL>(); }
template <bool PDL> __global__ void copy1(const uint4* x, uint4* y, int v) {  // v vectors in all
  enter<PDL>();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < v) y[i] = x[i];
}
template <bool PDL> __global__ void store1(const uint4* x, uint4* y, int v) {
  enter<PDL>();
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < v) y[i] = make_uint4(i, 0, 0, 0);
}
// one row per block: sum of squares of a row of bf16 in 16-byte vectors, one vector a thread, one barrier
template <bool PDL> __global__ void norm1(const uint4* x, uint4* y, int per_row) {
  enter<PDL>();
  __shared__ float part[32];
  const uint4 v = x[(size_t)blockIdx.x * per_row + threadIdx.x];
  const __nv_bfloat162* p = reinterpret_cast<const __nv_bfloat162*>(&v);
  float s = 0;
  float2 f[4];
#pragma unroll
  for (int i = 0; i < 4; i++) { f[i] = __bfloat1622float2(p[i]); s += f[i].x * f[i].x + f[i].y * f[i].y; }
#pragma unroll
  for (int o = 16; o; o /= 2) s += __shfl_xor_sync(~0u, s, o);
  if (threadIdx.x % 32 == 0) part[threadIdx.x / 32] = s;
  __syncthreads();
  s = threadIdx.x % 32 < blockDim.x / 32 ? part[threadIdx.x % 32] : 0;
#pragma unroll
  for (int o = 16; o; o /= 2) s += __shfl_xor_sync(~0u, s, o);
  float r = rsqrtf(s / (per_row * 8) + 1e-6f);
  uint4 out;
  __nv_bfloat162* q = reinterpret_cast<__nv_bfloat162*>(&out);
#pragma unroll
  for (int i = 0; i < 4; i++) q[i] = __float22bfloat162_rn(make_float2(f[i].x * r, f[i].y * r));
  y[(size_t)blockIdx.x * per_row + threadIdx.x] = out;
}

typedef void (*Kernel)(const uint4*, uint4*, int);
static float run(Kernel k, int grid, int block, int v, bool pdl, bool cold, char* pool, size_t pool_bytes) {
  const int N = 200;
  cudaStream_t s; CHECK(cudaStreamCreate(&s));
  cudaGraph_t g; cudaGraphExec_t ge;
  CHECK(cudaStreamBeginCapture(s, cudaStreamCaptureModeThreadLocal));
  size_t bytes = (size_t)v * 16, slot = (bytes + 255) / 256 * 256, at = 0;
  for (int i = 0; i < N; i++) {
    char* in = pool + at; char* out = pool + at + slot;
    if (cold) { at += 2 * slot; if (at + 2 * slot > pool_bytes) at = 0; }
    cudaLaunchConfig_t c = {}; c.gridDim = grid; c.blockDim = block; c.stream = s;
    cudaLaunchAttribute a[1];
    a[0].id = cudaLaunchAttributeProgrammaticStreamSerialization; a[0].val.programmaticStreamSerializationAllowed = 1;
    c.attrs = a; c.numAttrs = pdl ? 1 : 0;
    CHECK(cudaLaunchKernelEx(&c, k, (const uint4*)in, (uint4*)out, v / (k == (Kernel)norm1<false> || k == (Kernel)norm1<true> ? grid : 1)));
  }
  CHECK(cudaStreamEndCapture(s, &g));
  CHECK(cudaGraphInstantiate(&ge, g, 0));
  cudaEvent_t b, e; cudaEventCreate(&b); cudaEventCreate(&e);
  std::vector<float> t;
  for (int i = 0; i < 30; i++) {
    if (cold) CHECK(cudaMemsetAsync(pool + pool_bytes, i, pool_bytes / 2, s));
    CHECK(cudaEventRecord(b, s)); CHECK(cudaGraphLaunch(ge, s)); CHECK(cudaEventRecord(e, s)); CHECK(cudaEventSynchronize(e));
    float ms; cudaEventElapsedTime(&ms, b, e); t.push_back(ms * 1000 / N);
  }
  std::sort(t.begin(), t.end());
  cudaGraphExecDestroy(ge); cudaGraphDestroy(g); cudaStreamDestroy(s);
  return t[t.size() / 2];
}

int main() {
  size_t pool_bytes = (size_t)512 << 20; char* pool;
  CHECK(cudaMalloc(&pool, pool_bytes * 2)); CHECK(cudaMemset(pool, 0, pool_bytes * 2));
  printf("us per kernel in a graph of 200; ratio to empty of the same launch kind\n");
  printf("%6s %6s %5s %5s | %6s | %6s %6s %6s | over empty\n", "rows", "cols", "pdl", "cold", "empty", "store", "copy", "norm");
  for (int cold = 0; cold < 2; cold++) for (int pdl = 0; pdl < 2; pdl++)
    for (int rows : {1, 16, 64}) for (int cols : {2048, 8192}) {
      int v = rows * cols / 8, per = cols / 8;
      float e = run(pdl ? empty<true> : empty<false>, rows, per, v, pdl, cold, pool, pool_bytes);
      float s = run(pdl ? store1<true> : store1<false>, rows, per, v, pdl, cold, pool, pool_bytes);
      float c = run(pdl ? copy1<true> : copy1<false>, rows, per, v, pdl, cold, pool, pool_bytes);
      float n = run(pdl ? norm1<true> : norm1<false>, rows, per, v, pdl, cold, pool, pool_bytes);
      printf("%6d %6d %5d %5d | %6.2f | %6.2f %6.2f %6.2f | %5.2f %5.2f %5.2f\n", rows, cols, pdl, cold, e, s, c, n, s / e, c / e, n / e);
    }
  float e1 = run(empty<false>, 1, 32, 1, false, false, pool, pool_bytes);
  printf("empty<<<1,32>>> %.2f us\n", e1);
}
