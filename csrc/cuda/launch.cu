// Owns what is asked of a device, the error for what CUDA refuses, and the way to the instances of an element type.
#include <atomic>
#include <stdexcept>

#include "device.cuh"
#include "launch.cuh"

namespace irframework_vllm_c::cuda {

void refuse(const char* op, const char* what) {
  throw std::runtime_error("irframework_vllm_c::" + std::string(op) + ": " + what);
}

// Two threads that ask for the first time write the same numbers.
const DeviceFacts& facts_of(int device) {
  constexpr int kDevices = 128;
  static DeviceFacts facts[kDevices];
  static std::atomic<bool> known[kDevices];
  if (device < 0 || device >= kDevices) refuse("facts_of", "a device index of 128 or more");
  if (!known[device].load(std::memory_order_acquire)) {
    int major = 0, minor = 0, multiprocessors = 0;
    check("facts_of", cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device));
    check("facts_of", cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device));
    check("facts_of", cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device));
    facts[device] = {multiprocessors, 10 * major + minor};
    known[device].store(true, std::memory_order_release);
  }
  return facts[device];
}

void use_device(const char* op, int device) {
  int current = -1;
  check(op, cudaGetDevice(&current));
  if (current != device) check(op, cudaSetDevice(device));
}

// ---- the instances of each element type, in a file of its own ----------------------------------------------------------

#define IRF_INSTANCES(type)                                                                              \
  void run_rows_##type##_plain(const char* op, const RowOp& what, const RowArgs& args, const Place& at); \
  void run_rows_##type##_add(const char* op, const RowOp& what, const RowArgs& args, const Place& at);   \
  void run_elements_##type(const char* op, Map map, const ElementArgs& args, const Place& at);
IRF_INSTANCES(f32)
IRF_INSTANCES(bf16)
IRF_INSTANCES(f16)
#undef IRF_INSTANCES

void run_rows(const char* op, const RowOp& what, const RowArgs& args, const Place& place) {
  const bool add = what.source == Source::add;
  switch (what.type) {
    case Type::f32:
      return (add ? run_rows_f32_add : run_rows_f32_plain)(op, what, args, place);
    case Type::bf16:
      return (add ? run_rows_bf16_add : run_rows_bf16_plain)(op, what, args, place);
    case Type::f16:
      return (add ? run_rows_f16_add : run_rows_f16_plain)(op, what, args, place);
  }
}

void run_elements(const char* op, Type type, Map map, const ElementArgs& args, const Place& place) {
  switch (type) {
    case Type::f32:
      return run_elements_f32(op, map, args, place);
    case Type::bf16:
      return run_elements_bf16(op, map, args, place);
    case Type::f16:
      return run_elements_f16(op, map, args, place);
  }
}

}  // namespace irframework_vllm_c::cuda

// ---- for the plugin and for benchmarks, through ctypes ------------------------------------------------------------------

namespace cuda = irframework_vllm_c::cuda;

#define IRF_EXPORT extern "C" __attribute__((visibility("default")))

// The CUDA versions of this library and of the driver, as 1000 * major + 10 * minor; a driver's 0 means that there is none.
IRF_EXPORT void irframework_vllm_c_cuda_versions(int* runtime, int* driver) {
  *runtime = CUDART_VERSION;
  if (cudaDriverGetVersion(driver) != cudaSuccess) *driver = 0;
}

namespace {

struct Nothing {
  int unused;
};
__global__ void nothing(Nothing) { cuda::enter(); }

}  // namespace

// Launches a kernel that does nothing: what a launch costs. Returns 0, or 1 where CUDA refused.
IRF_EXPORT int irframework_vllm_c_launch_nothing(int device, void* stream, int overlap) {
  try {
    cuda::launch("nothing", nothing, dim3(1), dim3(32), cuda::Plan{32, 0, 1, 1, 0, 0, overlap}, Nothing{0},
                 cuda::Place{device, stream});
  } catch (const std::exception&) {
    return 1;
  }
  return 0;
}
