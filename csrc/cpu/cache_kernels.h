// Owns the writes to the paged cache. Included by kernels_body.h, inside the namespace of one instruction set.

// A token with a negative slot is left out.
static void cached(const CacheArgs& a, int64_t begin, int64_t end, void*) {
  for (int64_t token = begin; token < end; ++token) {
    const int64_t slot = a.wide_slots ? ((const int64_t*)a.slots)[token] : ((const int32_t*)a.slots)[token];
    if (slot < 0) continue;
    for (const CachedTensor& t : a.tensors) {
      const char* in = t.in + token * t.token_stride;
      char* out = t.out + slot * t.heads * t.head_bytes;
      if (t.head_stride == t.head_bytes) {
        __builtin_memcpy(out, in, t.heads * t.head_bytes);
        continue;
      }
      for (int64_t head = 0; head < t.heads; ++head) {
        __builtin_memcpy(out + head * t.head_bytes, in + head * t.head_stride, t.head_bytes);
      }
    }
  }
}
