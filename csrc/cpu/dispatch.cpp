// Owns the choice of the instruction set, made once when first needed. The two extern "C" functions are for
// diagnostics and tests, through ctypes; they need no torch.
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>

#include "kernels.h"

namespace irframework_vllm_c {
namespace {

constexpr const char* kVariable = "IRFRAMEWORK_VLLM_C_ISA";

const Kernels* find(const char* name) {
#if defined(IRFRAMEWORK_X86)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  const bool any = name == nullptr;
  if (avx512 && (any || std::strcmp(name, "avx512") == 0)) return &kAvx512Kernels;
  if (avx2 && (any || std::strcmp(name, "avx2") == 0)) return &kAvx2Kernels;
#endif
  if (name == nullptr || std::strcmp(name, "plain") == 0) return &kPlainKernels;
  return nullptr;
}

std::atomic<const Kernels*> active{nullptr};

}  // namespace

const Kernels& active_kernels() {
  const Kernels* kernels = active.load(std::memory_order_acquire);
  if (kernels != nullptr) return *kernels;
  const char* name = std::getenv(kVariable);
  if (name != nullptr && *name == '\0') name = nullptr;
  kernels = find(name);
  if (kernels == nullptr) {
    throw std::runtime_error(std::string(kVariable) + "=" + name +
                             " names no instruction set that this processor and build have; use avx512, avx2 or "
                             "plain, or unset it");
  }
  active.store(kernels, std::memory_order_release);
  return *kernels;
}

}  // namespace irframework_vllm_c

// Name of the instruction set in use ("avx512", "avx2", "plain"), or an empty string when the variable is wrong.
extern "C" __attribute__((visibility("default"))) const char* irframework_vllm_c_isa() {
  try {
    return irframework_vllm_c::active_kernels().isa;
  } catch (const std::exception&) {
    return "";
  }
}

// Switches to another instruction set; nullptr means the best one. False when this processor lacks it.
extern "C" __attribute__((visibility("default"))) bool irframework_vllm_c_use_isa(const char* name) {
  const auto* kernels = irframework_vllm_c::find(name);
  if (kernels != nullptr) irframework_vllm_c::active.store(kernels, std::memory_order_release);
  return kernels != nullptr;
}
