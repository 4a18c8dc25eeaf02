// Owns running a kernel on the CPU: on how many threads, and when an output is written around the caches.
#include "../common/launch.h"

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <memory>
#include <string>

#include "kernels.h"

namespace irframework_vllm_c {
namespace {

int64_t bytes_of(Type type) { return type == Type::f32 ? 4 : 2; }

// Bytes that one thread should have to move before another is worth waking; and the size of an output from which it is
// written around the caches. Such an output has left the second-level cache before anybody reads it, and lines that are
// written whole need not be fetched first: measured with a reader behind, 8 MiB and more gain 10 to 30 percent, 4 MiB lose.
constexpr int64_t kBytesPerThread = 128 * 1024;
constexpr int64_t kStreamBytes = 8 * 1024 * 1024;

// Runs a kernel over all rows, on as many threads as pay. Each gets `scratch_bytes` of its own.
template <typename Args>
void run_threads(void (*kernel)(const Args&, int64_t, int64_t, void*), const Args& args, int64_t rows, int64_t bytes_per_row,
         int64_t scratch_bytes = 0) {
  struct Job {
    void (*kernel)(const Args&, int64_t, int64_t, void*);
    const Args* args;
    int64_t scratch_bytes;

    void operator()(int64_t begin, int64_t end) const {
      const std::unique_ptr<char[]> scratch(scratch_bytes > 0 ? new char[scratch_bytes] : nullptr);
      kernel(*args, begin, end, scratch.get());
    }
  } const job{kernel, &args, scratch_bytes};
  const int64_t grain = kBytesPerThread / (bytes_per_row > 0 ? bytes_per_row : 1) + 1;
  if (rows <= grain) {
    job(0, rows);
    return;
  }
  STABLE_TORCH_ERROR_CODE_CHECK(torch_parallel_for(
      0, rows, grain,
      [](int64_t begin, int64_t end, void* context) { (*static_cast<const Job*>(context))(begin, end); },
      const_cast<Job*>(&job)));
}

bool is_large(int64_t rows, int64_t cols, Type type, Quantisation quantisation) {
  return rows * cols * (quantisation == Quantisation::none ? bytes_of(type) : 1) >= kStreamBytes;
}

}  // namespace

// What moves for each row: x and the norm, and with a residual that and the sum.
void run(const char*, const Device&, NormArgs& args, int64_t rows) {
  const bool coded = args.quantisation != Quantisation::none;
  const int64_t row_bytes = args.cols * bytes_of(args.type);
  args.stream = args.out != args.x && is_large(rows, args.cols, args.type, args.quantisation);
  const int64_t moved = (args.residual != nullptr ? 3 : 1) * row_bytes + (coded ? args.cols : row_bytes);
  run_threads(active_kernels().norm, args, rows, moved, args.quantisation == Quantisation::dynamic ? row_bytes : 0);
}

void run(const char*, const Device&, GateArgs& args, int64_t rows) {
  const bool coded = args.quantisation != Quantisation::none;
  const int64_t row_bytes = args.cols * bytes_of(args.type);
  args.stream = is_large(rows, args.cols, args.type, args.quantisation);
  run_threads(active_kernels().gated, args, rows, 2 * row_bytes + (coded ? args.cols : row_bytes),
              coded ? row_bytes : 0);
}

void run(const char*, const Device&, QuantArgs& args, int64_t rows) {
  args.stream = args.numel >= kStreamBytes;
  run_threads(active_kernels().quantised, args, rows, args.cols * (bytes_of(args.type) + 1));
}

void run_with_one_scale(const char* op, const Device& device, QuantArgs& args, int64_t rows, float* scale) {
  const std::unique_ptr<float[]> largest(new float[rows]);
  args.scales = largest.get();
  if (args.numel > 0) run_threads(active_kernels().magnitudes, args, rows, args.cols * bytes_of(args.type));
  *scale = active_kernels().scale_of_all(largest.get(), args.numel > 0 ? rows : 0);
  args.scale = scale;
  if (args.numel > 0) run(op, device, args, rows);
}

void run(const char*, const Device&, PointwiseArgs& args, int64_t rows) {
  const int64_t row_bytes = args.cols * bytes_of(args.type);
  args.stream = args.numel * bytes_of(args.type) >= kStreamBytes;
  run_threads(active_kernels().pointwise, args, rows, (has_gate(args.function) ? 3 : 2) * row_bytes);
}

void run(const char*, const Device&, GroupQuantArgs& args, int64_t rows) {
  args.stream = rows * args.cols >= kStreamBytes;
  run_threads(active_kernels().group_quantised, args, rows, args.cols * (bytes_of(args.type) + 1));
}

void run(const char*, const Device&, DequantArgs& args, int64_t rows) {
  args.stream = is_large(rows, args.cols, args.type, Quantisation::none);
  run_threads(active_kernels().dequantised, args, rows, args.cols * (bytes_of(args.type) + 1));
}

void run(const char*, const Device&, RotaryArgs& args, int64_t tokens) {
  int64_t heads = 0;
  for (int k = 0; k < args.tensor_count; ++k) heads += args.tensors[k].heads;
  run_threads(active_kernels().rotary, args, tokens, 2 * heads * args.head_size * bytes_of(args.type));
}

void run(const char*, const Device&, HeadAnglesArgs& args, int64_t tokens) {
  const int64_t element = args.x.heads * bytes_of(args.type) + bytes_of(args.angle_type);
  run_threads(active_kernels().head_angles, args, tokens, 2 * args.head_size * element);
}

void run(const char*, const Device&, CacheArgs& args, int64_t tokens) {
  int64_t bytes = 0;
  for (const CachedTensor& tensor : args.tensors) bytes += 2 * tensor.heads * tensor.head_bytes;
  run_threads(active_kernels().cached, args, tokens, bytes);
}

// A thread's scratch: the queries as float32, and the sums of a span that is all of its sequence.
void run(const char*, const Device&, AttentionArgs& args, int64_t spans, int64_t keys, int64_t joins) {
  const int64_t heads = args.kv_heads * args.group, sizes = args.head_size + args.value_size;
  const int64_t scratch = (heads * args.query_width + args.part_width) * sizeof(float) + 64;
  run_threads(active_kernels().attended, args, spans * args.kv_heads, keys / spans * sizes * bytes_of(args.type), scratch);
  if (joins > 0) run_threads(active_kernels().joined_parts, args, joins * heads, 8 * args.value_width * 4);
}

void check_positions(const char* op, const Device&, const RotaryArgs& args, int64_t tokens) {
  for (int64_t i = 0; i < tokens; ++i) {
    if (args.positions[i] < 0 || args.positions[i] >= args.cache_rows) {
      fail(op, "position " + std::to_string(args.positions[i]) + " is outside cos_sin_cache, which has " +
                   std::to_string(args.cache_rows) + " rows");
    }
  }
}

}  // namespace irframework_vllm_c
