// Owns turning an op's arguments into a launch: the kernel's own arguments, the current device and torch's stream.
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>

#include <optional>

#include "../common/launch.h"
#include "kernels.h"

namespace irframework_vllm_c {
namespace {

// Makes the tensors' device the current one for as long as this lives. Where it is already, nothing is switched.
class Here {
 public:
  Here(const char* op, const Device& device) : place_{device.index, nullptr} {
    int32_t current = -1;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_device_index(&current));
    if (current != device.index) guard_.emplace(device.index);
    cuda::use_device(op, device.index);
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device.index, &place_.stream));
  }
  operator const cuda::Place&() const { return place_; }

 private:
  std::optional<torch::stable::accelerator::DeviceGuard> guard_;
  cuda::Place place_;
};

cuda::Quant quant_of(Quantisation quantisation) {
  switch (quantisation) {
    case Quantisation::fixed:
      return cuda::Quant::fixed;
    case Quantisation::dynamic:
      return cuda::Quant::per_row;
    case Quantisation::none:
      break;
  }
  return cuda::Quant::none;
}

}  // namespace

void run(const char* op, const Device& device, NormArgs& args, int64_t rows) {
  const Here here(op, device);
  cuda::RowArgs a{};
  a.x = args.x;
  a.residual = args.residual;
  a.sum = args.sum;
  a.weight = args.weight;
  a.scale = args.scale;
  a.out = args.out;
  a.row_scales = args.scales;
  a.x_rows = args.x_rows;
  a.residual_rows = args.residual_rows;
  a.sum_rows = args.sum_rows;
  a.out_rows = args.out_rows;
  a.rows = rows;
  a.cols = args.cols;
  a.epsilon = args.epsilon;
  a.inverse_cols = 1.0f / static_cast<float>(args.cols);
  a.weight_type = args.weight == nullptr ? cuda::Weight::none : static_cast<cuda::Weight>(args.weight_type);
  const cuda::Source source = args.residual == nullptr ? cuda::Source::plain : cuda::Source::add;
  cuda::run_rows(op, {args.type, source, true, quant_of(args.quantisation)}, a, here);
}

void run(const char* op, const Device& device, GateArgs& args, int64_t rows) {
  const Here here(op, device);
  if (args.quantisation != Quantisation::dynamic) {
    const cuda::Map map = args.quantisation == Quantisation::fixed ? cuda::Map::silu_quant
                          : args.gate == Gate::silu                ? cuda::Map::silu
                          : args.gate == Gate::gelu_erf            ? cuda::Map::gelu_erf
                                                                   : cuda::Map::gelu_tanh;
    if (args.cols > 0) {
      cuda::run_elements(op, args.type, map, {args.x, args.out, args.scale, args.x_rows, rows, args.cols}, here);
    }
    return;
  }
  cuda::RowArgs a{};
  a.x = args.x;
  a.out = args.out;
  a.row_scales = args.scales;
  a.x_rows = args.x_rows;
  a.out_rows = contiguous_rows(rows, args.cols);
  a.rows = rows;
  a.cols = args.cols;
  a.weight_type = cuda::Weight::none;
  cuda::run_rows(op, {args.type, cuda::Source::silu, false, cuda::Quant::per_row}, a, here);
}

void run(const char* op, const Device& device, QuantArgs& args, int64_t rows) {
  const Here here(op, device);
  if (args.scale == nullptr) {
    cuda::RowArgs a{};
    a.x = args.x;
    a.out = args.codes;
    a.row_scales = args.scales;
    a.x_rows = args.x_rows;
    a.out_rows = contiguous_rows(rows, args.cols);
    a.rows = rows;
    a.cols = args.cols;
    a.weight_type = cuda::Weight::none;
    cuda::run_rows(op, {args.type, cuda::Source::plain, false, cuda::Quant::per_row}, a, here);
    return;
  }
  if (rows * args.cols == args.numel) {
    cuda::run_elements(op, args.type, cuda::Map::quant, {args.x, args.codes, args.scale, args.x_rows, rows, args.cols},
                       here);
    return;
  }
  // A contiguous tensor, cut into rows of which the last is shorter: the whole ones, and what is left.
  const int64_t whole = rows - 1, size = args.type == Type::f32 ? 4 : 2;
  if (whole > 0) {
    cuda::run_elements(op, args.type, cuda::Map::quant, {args.x, args.codes, args.scale, args.x_rows, whole, args.cols},
                       here);
  }
  const int64_t done = whole * args.cols, left = args.numel - done;
  const void* x = static_cast<const char*>(args.x) + done * size;
  cuda::run_elements(op, args.type, cuda::Map::quant, {x, args.codes + done, args.scale, contiguous_rows(1, left), 1, left},
                     here);
}

void run(const char* op, const Device& device, RotaryArgs& args, int64_t tokens) {
  cuda::run_rotary(op, args, tokens, Here(op, device));
}

// Reading them would wait for the device. The kernel gives NaN for a position outside the cache, and reads nothing there.
void check_positions(const char*, const Device&, const RotaryArgs&, int64_t) {}

}  // namespace irframework_vllm_c
