// A copy that bypasses the caches, for KV transfer: another core reads the target, or much later.
#include <cstring>
#include <optional>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "bind.h"

namespace {

constexpr size_t kLine = 64;
constexpr size_t kAhead = 1024;  // bytes; past the end the prefetch is harmless
// Connection threads copy while the engine's thread computes and needs the GIL at times. A copy
// below this size ends before releasing the GIL would help.
constexpr size_t kLong = 64 << 10;

// Streaming stores of whole lines need no fetch of the old line; fetching one that another core has
// just read costs several times the copy. The copied source does not displace the caller's data.
void copy_lines(uint8_t* to, const uint8_t* from, size_t bytes) {
#if defined(__SSE2__)
  for (size_t at = 0; at < bytes; at += kLine) {
    const __m128i* in = reinterpret_cast<const __m128i*>(from + at);
    __m128i* out = reinterpret_cast<__m128i*>(to + at);
    _mm_prefetch(reinterpret_cast<const char*>(in) + kAhead, _MM_HINT_NTA);
    __m128i a = _mm_loadu_si128(in), b = _mm_loadu_si128(in + 1);
    __m128i c = _mm_loadu_si128(in + 2), d = _mm_loadu_si128(in + 3);
    _mm_stream_si128(out, a);
    _mm_stream_si128(out + 1, b);
    _mm_stream_si128(out + 2, c);
    _mm_stream_si128(out + 3, d);
  }
  _mm_sfence();
#else
  std::memcpy(to, from, bytes);
#endif
}

void copy_past_caches(const Array<uint8_t, 1>& target, const Array<const uint8_t, 1>& source) {
  require(target.size() == source.size(), "target and source differ in size");
  uint8_t* to = target.data();
  const uint8_t* from = source.data();
  size_t bytes = target.size();

  std::optional<nb::gil_scoped_release> release;
  if (bytes >= kLong) release.emplace();
  size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
  head = head < bytes ? head : bytes;
  size_t lines = (bytes - head) / kLine * kLine, tail = head + lines;
  std::memcpy(to, from, head);
  copy_lines(to + head, from + head, lines);
  std::memcpy(to + tail, from + tail, bytes - tail);
}

}  // namespace

void bind_copy_past_caches(nb::module_& m) {
  m.def("copy_past_caches", &copy_past_caches, array("target"), array("source"),
        "Copies bytes without leaving them in a cache. The two must not overlap.");
}
