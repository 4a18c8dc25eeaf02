// Owns the C interface of the host library: the queue, the compilation of kernels.cpp, and their launches. It is
// compiled where it runs, against the headers that lie beside the SYCL run-time library found there, so that the two
// always fit. Knows nothing of torch: pointers, sizes and a queue come in.
//
// Every function returns null, or a message that is valid until the same thread calls again. No exception leaves.
#include <sycl/sycl.hpp>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments.h"

namespace irframework_xpu_sycl {
namespace {

namespace syclexp = sycl::ext::oneapi::experimental;

// Group counts and global ids stay far below 2^31, which SYCL counts on; rows beyond it are taken by the same groups.
constexpr int64_t kMostGroups = 1 << 16;
constexpr int64_t kMostItems = 512;

thread_local std::string message;

template <typename Body>
const char* guarded(Body body) {
  try {
    body();
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
  } catch (...) {
    message = "an exception that says nothing";
  }
  if (message.empty()) message = "an exception that says nothing";
  return message.c_str();
}

// The kernels of one dtype, for one context and device.
struct Kernels {
  std::vector<sycl::kernel> by_number;  // in the order of the names that were asked for
  int64_t most_items;
};

int64_t items_for(int64_t work, int64_t most) {
  int64_t items = 32;
  while (items < work && 2 * items <= most) items *= 2;
  return items;
}

template <typename SetArguments>
void launch(const Kernels& kernels, int32_t number, sycl::queue& queue, int64_t groups, int64_t work, bool wait,
            SetArguments set_arguments) {
  const int64_t items = items_for(work, kernels.most_items);
  groups = std::min(groups, kMostGroups);
  const sycl::nd_range<1> range(static_cast<size_t>(groups * items), static_cast<size_t>(items));
  sycl::event event = queue.submit([&](sycl::handler& handler) {
    set_arguments(handler);
    handler.parallel_for(range, kernels.by_number.at(number));
  });
  if (wait) event.wait_and_throw();
}

}  // namespace
}  // namespace irframework_xpu_sycl

using namespace irframework_xpu_sycl;

extern "C" {

// The first CPU device of the OpenCL backend, and an in-order queue on it. Never freed: at exit the run-time library
// may be gone before whoever would free it.
const char* irframework_sycl_cpu_queue(void** queue) {
  return guarded([&] {
    for (const sycl::device& device : sycl::device::get_devices(sycl::info::device_type::cpu)) {
      if (device.get_backend() != sycl::backend::opencl) continue;
      *queue = new sycl::queue(device, sycl::property::queue::in_order());
      return;
    }
    *queue = nullptr;
  });
}

const char* irframework_sycl_compile(void* queue, const char* source, const char* arguments_header,
                                     const char* const* options, int32_t option_count, const char* const* names,
                                     int32_t name_count, void** compiled) {
  return guarded([&] {
    const sycl::queue& on = *static_cast<sycl::queue*>(queue);
    sycl::device device = on.get_device();
    if (!device.has(sycl::aspect::fp16)) throw std::runtime_error("the device has no float16 arithmetic");
    if (!device.ext_oneapi_can_compile(syclexp::source_language::sycl)) {
      throw std::runtime_error("this run-time library cannot compile SYCL source for the device");
    }
    auto bundle = syclexp::create_kernel_bundle_from_source(
        on.get_context(), syclexp::source_language::sycl, std::string(source),
        syclexp::properties{syclexp::include_files{"arguments.h", std::string(arguments_header)}});
    std::vector<std::string> flags(options, options + option_count);
    std::string log;
    std::unique_ptr<Kernels> kernels;
    try {
      auto built = syclexp::build(
          bundle, std::vector<sycl::device>{device},
          syclexp::properties{syclexp::build_options{flags}, syclexp::save_log{&log}});
      kernels = std::make_unique<Kernels>(Kernels{{}, kMostItems});
      for (int32_t i = 0; i < name_count; ++i) {
        const sycl::kernel kernel = built.ext_oneapi_get_kernel(names[i]);
        const size_t most = kernel.get_info<sycl::info::kernel_device_specific::work_group_size>(device);
        kernels->most_items = std::min(kernels->most_items, static_cast<int64_t>(most));
        kernels->by_number.push_back(kernel);
      }
    } catch (const std::exception& error) {
      throw std::runtime_error(log.empty() ? error.what() : log);
    }
    *compiled = kernels.release();  // kept for the life of the process, as the queue
  });
}

const char* irframework_sycl_rows(void* compiled, int32_t number, void* queue, int32_t wait, void* const* pointers,
                                  const int64_t* sizes, float epsilon) {
  return guarded([&] {
    RowSizes all{};
    static_assert(sizeof(RowSizes) == 8 * (2 + 4 * 5 + 1));
    std::memcpy(&all, sizes, 8 * (2 + 4 * 5));
    all.epsilon = epsilon;
    launch(*static_cast<Kernels*>(compiled), number, *static_cast<sycl::queue*>(queue), all.rows, all.columns, wait,
           [&](sycl::handler& handler) {
             for (int i = 0; i < 8; ++i) handler.set_arg(i, pointers[i]);
             handler.set_arg(8, all);
           });
  });
}

const char* irframework_sycl_rotary(void* compiled, int32_t number, void* queue, int32_t wait, void* const* pointers,
                                    const int64_t* sizes, int32_t neighbours, int32_t long_positions) {
  return guarded([&] {
    RotarySizes all{};
    static_assert(sizeof(RotarySizes) == 8 * (9 + 2 * 5 + 1));
    std::memcpy(&all, sizes, 8 * (9 + 2 * 5));
    all.neighbours = neighbours;
    all.long_positions = long_positions;
    launch(*static_cast<Kernels*>(compiled), number, *static_cast<sycl::queue*>(queue), all.tokens,
           (all.query_heads + all.key_heads) * all.half, wait, [&](sycl::handler& handler) {
             for (int i = 0; i < 6; ++i) handler.set_arg(i, pointers[i]);
             handler.set_arg(6, all);
           });
  });
}

}  // extern "C"
