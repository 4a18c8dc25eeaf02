// Owns the op decode_attention: its checks, how the keys of its sequences are cut into spans, and its arguments. Only the
// CPU library has it. The numbers in its integer tensors are read here, and never lead outside of a tensor.
#include <algorithm>
#include <cstring>
#include <memory>
#include <vector>

#include "launch.h"
#include "ops.h"

namespace irframework_vllm_c {
namespace {

// Keys that are attended to in one piece. Where a sequence is cut depends on nothing but itself, so that its result does
// not depend on the batch or the number of threads.
constexpr int64_t kSpan = 512;

int64_t whole_vectors(int64_t size) { return (size + 15) / 16 * 16; }

const int32_t* numbers_of(const char* op, const View& v, int64_t dims) {
  static const int32_t int32 = aoti_torch_dtype_int32();
  if (v.dtype != int32 || v.dims != dims || (v.size(-1) > 1 && v.stride(-1) != 1)) {
    fail(op, std::string(v.name) + " must be int32, dense, with " + std::to_string(dims) + " dimension(s), got shape " +
                 shape_of(v));
  }
  return static_cast<const int32_t*>(data_of(v));
}

AttendedTensor attended_tensor(const char* op, const View& v, const View& query) {
  if (v.dtype != query.dtype) fail(op, std::string(v.name) + " must have the dtype of query");
  check_dense_rows(op, v);
  return {data_of(v), v.dims == 4 ? v.stride(0) : 0, v.stride(-3), v.stride(-2)};
}

// The arguments that do not depend on numbers in tensors.
AttentionArgs arguments_of(const char* op, const View& query, const View& keys, const View& values, bool paged) {
  const int64_t dims = paged ? 4 : 3;
  bool fits = query.dims == 3 && keys.dims == dims && values.dims == dims && query.size(-1) == keys.size(-1);
  for (int64_t d = 0; fits && d < dims - 1; ++d) fits = keys.size(d) == values.size(d);
  fits = fits && keys.size(-2) > 0 && query.size(1) % keys.size(-2) == 0;
  if (!fits) {
    fail(op, std::string("query must have shape [tokens, heads, head_size], keys and values ") +
                 (paged ? "[blocks, block_size, kv_heads, size]" : "[key_tokens, kv_heads, size]") + ", got " +
                 shape_of(query) + ", " + shape_of(keys) + " and " + shape_of(values));
  }
  AttentionArgs args{};
  args.type = floating_type(op, query);
  check_dense_rows(op, query);
  args.query = data_of(query);
  args.token_stride = query.stride(0);
  args.head_stride = query.stride(1);
  args.keys = attended_tensor(op, keys, query);
  args.values = attended_tensor(op, values, query);
  args.block_size = keys.size(dims - 3);
  args.block_count = paged ? keys.size(0) : 1;
  args.kv_heads = keys.size(-2);
  args.group = query.size(1) / args.kv_heads;
  args.head_size = query.size(2);
  args.value_size = values.size(-1);
  args.query_width = whole_vectors(args.head_size);
  args.value_width = whole_vectors(args.value_size);
  args.part_width = query.size(1) * args.value_width + whole_vectors(2 * query.size(1));
  return args;
}

struct Cut {
  std::vector<AttentionSpan> spans;
  std::vector<AttentionJoin> joins;
  std::vector<bool> covered;  // by token
  int64_t parts = 0;
  int64_t keys = 0;

  explicit Cut(int64_t tokens) : covered(tokens) {}

  void add(int64_t token, int64_t start, int64_t first, int64_t last) {
    const int64_t pieces = (last - first + kSpan - 1) / kSpan;
    covered[token] = true;
    keys += last - first;
    if (pieces < 2) {
      spans.push_back({token, start, first, last, -1});
      return;
    }
    joins.push_back({token, parts, pieces});
    for (; first < last; first += kSpan) {
      spans.push_back({token, start, first, std::min(first + kSpan, last), parts++});
    }
  }
};

void attend(const char* op, const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& cu_seqlens_q,
            const OptionalTensor& seq_lens, std::optional<int64_t> max_seqlen_k, const OptionalTensor& block_table,
            double scale, std::optional<int64_t> window, std::optional<double> soft_cap, const OptionalTensor& sinks,
            Tensor* out, bool given) {
  const View q = view_of(op, "query", query), k = view_of(op, "keys", keys, q.device);
  const View v = view_of(op, "values", values, q.device), cut_at = view_of(op, "cu_seqlens_q", cu_seqlens_q, q.device);
  AttentionArgs args = arguments_of(op, q, k, v, block_table.has_value());
  const int32_t* offsets = numbers_of(op, cut_at, 1);
  const int64_t sequences = cut_at.size(0) - 1, tokens = q.size(0), rows = k.size(0);
  const int32_t* lengths = nullptr;
  int64_t room = rows, table_stride = 0;
  if (seq_lens.has_value()) {
    const View at = view_of(op, "seq_lens", *seq_lens, q.device);
    lengths = numbers_of(op, at, 1);
    if (at.size(0) != sequences) fail(op, "seq_lens must hold a number for each sequence, got shape " + shape_of(at));
  }
  if (block_table.has_value()) {
    const View table = view_of(op, "block_table", *block_table, q.device);
    args.table = numbers_of(op, table, 2);
    table_stride = table.stride(0);
    room = table.size(1) * args.block_size;
    if (table.size(0) != sequences) fail(op, "block_table must have a row for each sequence, got " + shape_of(table));
    if (lengths == nullptr) fail(op, "block_table needs seq_lens");
  }
  if (max_seqlen_k.has_value()) room = std::min(room, std::max<int64_t>(*max_seqlen_k, 0));
  if (window.has_value() && *window < 1) fail(op, "window must be at least 1");
  if (soft_cap.has_value() && !(*soft_cap > 0)) fail(op, "soft_cap must be more than 0");
  args.scale = static_cast<float>(scale);
  args.soft_cap = static_cast<float>(soft_cap.value_or(0));
  if (sinks.has_value()) {
    const View at = view_of(op, "sinks", *sinks, q.device);
    args.sink_type = floating_type(op, at);
    if (at.dims != 1 || at.size(0) != q.size(1)) fail(op, "sinks must hold a number for each head, got " + shape_of(at));
    args.sinks = data_of(at);
    args.sink_stride = at.stride(0);
  }
  const int64_t sizes[3] = {tokens, q.size(1), args.value_size};
  *out = output_for(op, "out", given ? out : nullptr, q, sizes, q.dtype);
  args.out = out->data_ptr();
  if (tokens * sizes[1] * sizes[2] == 0) return;

  Cut cut(tokens);
  int64_t start = 0;
  for (int64_t sequence = 0; sequence < sequences; ++sequence) {
    const int64_t token = offsets[sequence];
    const bool queried = offsets[sequence + 1] > token && token >= 0 && token < tokens && !cut.covered[token];
    const int64_t length = lengths != nullptr ? std::max<int64_t>(lengths[sequence], 0) : 1;
    const int64_t from = args.table != nullptr ? sequence * table_stride : lengths != nullptr ? start : token;
    start += length;
    if (!queried) continue;
    const int64_t last = std::min({length, room, args.table != nullptr ? room : std::max<int64_t>(rows - from, 0)});
    cut.add(token, from, window.has_value() ? std::max<int64_t>(last - *window, 0) : 0, last);
  }
  const int64_t row_bytes = sizes[1] * sizes[2] * (args.type == Type::f32 ? 4 : 2);
  for (int64_t token = 0; token < tokens; ++token) {
    if (!cut.covered[token]) std::memset(static_cast<char*>(args.out) + token * row_bytes, 0, row_bytes);
  }
  if (cut.spans.empty()) return;
  const std::unique_ptr<float[]> parts(cut.parts > 0 ? new float[cut.parts * args.part_width + 16] : nullptr);
  args.spans = cut.spans.data();
  args.joins = cut.joins.data();
  args.parts = parts.get() + (16 - reinterpret_cast<uintptr_t>(parts.get()) / sizeof(float) % 16) % 16;
  run(op, q.device, args, cut.spans.size(), cut.keys, cut.joins.size());
}

}  // namespace

Tensor decode_attention(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& cu_seqlens_q,
                        OptionalTensor seq_lens, std::optional<int64_t> max_seqlen_k, OptionalTensor block_table,
                        double scale, std::optional<int64_t> window, std::optional<double> soft_cap,
                        OptionalTensor sinks) {
  Tensor out = query;
  attend("decode_attention", query, keys, values, cu_seqlens_q, seq_lens, max_seqlen_k, block_table, scale, window,
         soft_cap, sinks, &out, false);
  return out;
}

void decode_attention_out(const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& cu_seqlens_q,
                          OptionalTensor seq_lens, std::optional<int64_t> max_seqlen_k, OptionalTensor block_table,
                          double scale, std::optional<int64_t> window, std::optional<double> soft_cap,
                          OptionalTensor sinks, Tensor out) {
  attend("decode_attention", query, keys, values, cu_seqlens_q, seq_lens, max_seqlen_k, block_table, scale, window,
         soft_cap, sinks, &out, true);
}

}  // namespace irframework_vllm_c
