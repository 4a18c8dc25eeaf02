// Owns the op decode_attention: its checks, how the keys of its sequences are cut into spans, and its arguments. Only the
// CPU library has it. The numbers in its integer tensors are looked at here, before anything is written.
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
  args.kv_heads = keys.size(-2);
  args.group = query.size(1) / args.kv_heads;
  args.head_size = query.size(2);
  args.value_size = values.size(-1);
  args.query_width = whole_vectors(args.head_size);
  args.value_width = whole_vectors(args.value_size);
  args.part_width = query.size(1) * args.value_width + whole_vectors(2 * query.size(1));
  return args;
}

// Where the keys of a call's sequences are, as its integer tensors say.
struct Sequences {
  int64_t count;
  const int32_t* offsets;  // of the queries: `count + 1`
  const int32_t* lengths;  // in keys; null: as many as queries
  const int32_t* table;    // null: all keys lie side by side
  int64_t table_stride;
  int64_t longest;  // keys that a sequence may have
  int64_t block_count;
};

[[noreturn]] void fail_at(const char* op, const char* name, int64_t sequence, int64_t number, const std::string& limit) {
  fail(op, std::string(name) + " gives sequence " + std::to_string(sequence) + " " + std::to_string(number) + "; " + limit);
}

// Refuses what the op's own value check refuses.
void check_numbers(const char* op, const Sequences& s, const AttentionArgs& args, int64_t tokens, int64_t key_count) {
  if (s.offsets[0] != 0) fail(op, "cu_seqlens_q must start with 0, it starts with " + std::to_string(s.offsets[0]));
  for (int64_t i = 0; i < s.count; ++i) {
    const int64_t queries = int64_t{s.offsets[i + 1]} - s.offsets[i];
    if (queries < 0 || queries > 1) fail_at(op, "cu_seqlens_q", i, queries, "a sequence has one query, or none");
  }
  if (s.offsets[s.count] > tokens) {
    fail(op, "cu_seqlens_q ends with " + std::to_string(s.offsets[s.count]) + ", but there are " +
                 std::to_string(tokens) + " queries");
  }
  int64_t total = 0;
  for (int64_t i = 0; s.lengths != nullptr && i < s.count; ++i) {
    const int64_t length = s.lengths[i];
    if (length < 0 || length > s.longest) {
      fail_at(op, "seq_lens", i, length, "it may have 0 to " + std::to_string(s.longest) + " keys");
    }
    total += length;
    for (int64_t block = 0; s.table != nullptr && block * args.block_size < length; ++block) {
      const int64_t number = s.table[i * s.table_stride + block];
      if (number < 0 || number >= s.block_count) {
        fail_at(op, "block_table", i, number, "the cache has " + std::to_string(s.block_count) + " blocks");
      }
    }
  }
  if (s.table == nullptr && total > key_count) {
    fail(op, "seq_lens adds up to " + std::to_string(total) + " keys, but there are " + std::to_string(key_count));
  }
}

struct Cut {
  std::vector<AttentionSpan> spans;
  std::vector<AttentionJoin> joins;
  int64_t parts = 0;
  int64_t keys = 0;

  void add(int64_t token, int64_t start, int64_t first, int64_t last) {
    const int64_t pieces = (last - first + kSpan - 1) / kSpan;
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

// The first tokens, one after the other, belong to the sequences that have a query.
Cut cut_sequences(const Sequences& s, std::optional<int64_t> window) {
  Cut cut;
  cut.spans.reserve(s.count);
  int64_t start = 0;
  for (int64_t i = 0; i < s.count; ++i) {
    const int64_t queries = s.offsets[i + 1] - s.offsets[i], length = s.lengths != nullptr ? s.lengths[i] : queries;
    if (queries > 0) {
      const int64_t first = window.has_value() ? std::max<int64_t>(length - *window, 0) : 0;
      cut.add(s.offsets[i], s.table != nullptr ? i * s.table_stride : start, first, length);
    }
    start += length;
  }
  return cut;
}

// Reads what says where the keys are, and checks all of it.
Sequences sequences_of(const char* op, const View& query, const View& keys, const View& cut_at,
                       const OptionalTensor& seq_lens, std::optional<int64_t> max_seqlen_k,
                       const OptionalTensor& block_table, AttentionArgs& args) {
  Sequences s{};
  s.offsets = numbers_of(op, cut_at, 1);
  s.count = cut_at.size(0) - 1;
  s.longest = keys.size(0);
  if (s.count < 0) fail(op, "cu_seqlens_q must hold one number more than there are sequences, got none");
  if (seq_lens.has_value()) {
    const View at = view_of(op, "seq_lens", *seq_lens, query.device);
    s.lengths = numbers_of(op, at, 1);
    if (at.size(0) != s.count) fail(op, "seq_lens must hold a number for each sequence, got shape " + shape_of(at));
  } else if (block_table.has_value() || max_seqlen_k.has_value()) {
    fail(op, std::string(block_table.has_value() ? "block_table" : "max_seqlen_k") + " needs seq_lens");
  } else if (keys.size(0) != query.size(0)) {
    fail(op, "without seq_lens there must be as many keys as queries, got " + shape_of(keys) + " and " + shape_of(query));
  }
  if (block_table.has_value()) {
    const View table = view_of(op, "block_table", *block_table, query.device);
    args.table = s.table = numbers_of(op, table, 2);
    s.table_stride = table.stride(0);
    s.longest = table.size(1) * args.block_size;
    s.block_count = keys.size(0);
    if (table.size(0) != s.count) fail(op, "block_table must have a row for each sequence, got " + shape_of(table));
  }
  if (max_seqlen_k.has_value()) {
    if (*max_seqlen_k < 0) fail(op, "max_seqlen_k must not be negative");
    s.longest = std::min(s.longest, *max_seqlen_k);
  }
  check_numbers(op, s, args, query.size(0), keys.size(0));
  return s;
}

void attend(const char* op, const Tensor& query, const Tensor& keys, const Tensor& values, const Tensor& cu_seqlens_q,
            const OptionalTensor& seq_lens, std::optional<int64_t> max_seqlen_k, const OptionalTensor& block_table,
            double scale, std::optional<int64_t> window, std::optional<double> soft_cap, const OptionalTensor& sinks,
            Tensor* out, bool given) {
  const View q = view_of(op, "query", query), k = view_of(op, "keys", keys, q.device);
  const View v = view_of(op, "values", values, q.device), cut_at = view_of(op, "cu_seqlens_q", cu_seqlens_q, q.device);
  AttentionArgs args = arguments_of(op, q, k, v, block_table.has_value());
  const Sequences sequences = sequences_of(op, q, k, cut_at, seq_lens, max_seqlen_k, block_table, args);
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
  const int64_t sizes[3] = {q.size(0), q.size(1), args.value_size};
  *out = output_for(op, "out", given ? out : nullptr, q, sizes, q.dtype);
  args.out = out->data_ptr();
  if (sizes[0] * sizes[1] * sizes[2] == 0) return;

  const int64_t row_bytes = sizes[1] * sizes[2] * (args.type == Type::f32 ? 4 : 2);
  const int64_t covered = sequences.offsets[sequences.count];
  std::memset(static_cast<char*>(args.out) + covered * row_bytes, 0, (sizes[0] - covered) * row_bytes);
  const Cut cut = cut_sequences(sequences, window);
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
