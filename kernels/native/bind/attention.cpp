// Storing of keys and values, and attention over the pool, as kernels/reference/layers.py defines
// them, except for the pool's layout (attention/attend.h).
#include "bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <cmath>

#include "attention/attention.h"

using pdserve::KvLayer;
using pdserve::KvType;

KvType kv_type(const std::string& name) {
  if (name == "float32") return KvType::kF32;
  if (name == "bfloat16") return KvType::kBf16;
  if (name == "float16") return KvType::kF16;
  if (name == "int8") return KvType::kI8;
  throw std::invalid_argument("the type of keys must be float32, bfloat16, float16 or int8, not '" +
                              name + "'");
}

namespace {

void require_sizes(int64_t kv_heads, int64_t block_size, int64_t head_dim) {
  constexpr int64_t kMost = 1 << 16;
  require(kv_heads >= 1 && kv_heads <= kMost, "kv_heads must be 1 to 65536");
  require(head_dim >= 1 && head_dim <= kMost, "head_dim must be 1 to 65536");
  require(block_size >= 16 && block_size % 16 == 0 && block_size <= kMost,
          "block_size must be a multiple of 16, at most 65536");
}

// Returns a layer of these sizes, without memory.
KvLayer sized(const std::string& type, int64_t kv_heads, int64_t block_size, int64_t head_dim,
              int64_t latent) {
  require_sizes(kv_heads, block_size, head_dim);
  require(latent >= 0 && latent <= head_dim, "latent must be 0 to head_dim");
  KvLayer result;
  result.type = kv_type(type);
  result.block_size = block_size;
  result.kv_heads = kv_heads;
  result.head_dim = head_dim;
  result.latent = latent;
  result.block_bytes = pdserve::kv_block_bytes(result);
  return result;
}

}  // namespace

KvLayer kv_layer(uint8_t* data, int64_t block_bytes, const std::string& type, int64_t kv_heads,
                 int64_t block_size, int64_t head_dim, int64_t latent) {
  KvLayer result = sized(type, kv_heads, block_size, head_dim, latent);
  require(block_bytes == result.block_bytes, "kv must have kv_block_bytes bytes a block");
  result.data = data;
  require(reinterpret_cast<uintptr_t>(data) % 4 == 0, "kv must be aligned to 4 bytes");
  return result;
}

namespace {

// The kernels' type allows writing; kernels that read do not write.
template <class Pool>
KvLayer layer(const Pool& kv, const std::string& type, int64_t kv_heads, int64_t block_size,
              int64_t head_dim, int64_t latent) {
  return kv_layer(const_cast<uint8_t*>(kv.data()), static_cast<int64_t>(kv.shape(1)), type,
                  kv_heads, block_size, head_dim, latent);
}

void write_kv(Context& context, const Array<uint8_t, 2>& kv, const std::string& type,
              int64_t block_size, const Array<const float, 3>& k,
              const std::optional<Array<const float, 3>>& v, const Array<const int64_t, 1>& slots,
              int64_t latent) {
  require(v.has_value() == (latent == 0), "v is of layers that are not latent");
  for (size_t i = 0; v && i < 3; ++i) {
    require(k.shape(i) == v->shape(i), "k and v must have one shape");
  }
  int64_t tokens = static_cast<int64_t>(k.shape(0)), heads = static_cast<int64_t>(k.shape(1));
  int64_t head_dim = static_cast<int64_t>(k.shape(2));
  KvLayer pool = layer(kv, type, heads, block_size, head_dim, latent);
  require(slots.shape(0) == k.shape(0), "slots must have one value a token");
  int64_t limit = static_cast<int64_t>(kv.shape(0)) * block_size;
  for (int64_t t = 0; t < tokens; ++t) {
    require(slots.data()[t] >= 0 && slots.data()[t] < limit, "a slot is outside of kv");
  }
  nb::gil_scoped_release release;
  int64_t size = std::max<int64_t>(1, pdserve::ceil_div(tokens, 8 * context.pool.threads()));
  context.pool.run(pdserve::ceil_div(tokens, size), [&](int64_t piece, int) {
    for (int64_t t = piece * size; t < std::min(tokens, (piece + 1) * size); ++t) {
      const int64_t at = t * heads * head_dim;
      context.kernels.store_kv(pool, slots.data()[t], k.data() + at, v ? v->data() + at : nullptr);
    }
  });
}

void paged_attention(Context& context, const Array<const float, 3>& q,
                     const Array<const uint8_t, 2>& kv, const std::string& type, int64_t kv_heads,
                     int64_t block_size, const Array<const int64_t, 2>& block_table,
                     const Array<const int64_t, 1>& starts, const Array<const int64_t, 1>& kv_lens,
                     float scale, int64_t window, float soft_cap, const Array<float, 3>& out,
                     const std::optional<Array<const float, 1>>& sinks, int64_t latent) {
  const size_t value_dim = latent ? static_cast<size_t>(latent) : q.shape(2);
  require(q.shape(0) == out.shape(0) && q.shape(1) == out.shape(1) && out.shape(2) == value_dim,
          "out must have the shape of q, its heads as long as values");
  pdserve::AttentionBatch batch;
  int64_t tokens = static_cast<int64_t>(q.shape(0)), head_dim = static_cast<int64_t>(q.shape(2));
  batch.kv = layer(kv, type, kv_heads, block_size, head_dim, latent);
  batch.heads = static_cast<int64_t>(q.shape(1));
  require(batch.heads % kv_heads == 0, "heads must be a multiple of kv_heads");
  require(batch.heads >= 1 && batch.heads <= 1 << 16, "heads must be 1 to 65536");
  batch.rows = static_cast<int64_t>(kv_lens.shape(0));
  require(static_cast<int64_t>(starts.shape(0)) == batch.rows + 1,
          "starts must have rows + 1 values");
  require(static_cast<int64_t>(block_table.shape(0)) == batch.rows,
          "block_table must have one row a row");
  require(window >= 0 && window <= int64_t{1} << 40, "window must be 0 to 2^40");
  require(soft_cap >= 0 && std::isfinite(soft_cap), "soft_cap must be finite, 0 or more");
  require(starts.data()[0] == 0 && starts.data()[batch.rows] == tokens,
          "starts must run from 0 to the number of tokens");
  int64_t blocks = static_cast<int64_t>(kv.shape(0));
  batch.table_stride = static_cast<int64_t>(block_table.shape(1));
  for (int64_t r = 0; r < batch.rows; ++r) {
    int64_t len = kv_lens.data()[r], own = starts.data()[r + 1] - starts.data()[r];
    require(own >= 0 && own <= tokens, "starts must not decrease");
    require(len >= own && len <= batch.table_stride * block_size,
            "a row must have its own tokens at least, and no more than block_table holds");
    int64_t first = window > 0 ? std::max<int64_t>(0, len - own - window + 1) : 0;
    for (int64_t c = first / block_size; own > 0 && c * block_size < len; ++c) {
      int64_t block = block_table.data()[r * batch.table_stride + c];
      require(block >= 0 && block < blocks, "block_table names a block that kv does not have");
    }
  }
  batch.q = q.data();
  batch.q_stride = batch.heads * head_dim;
  batch.out = out.data();
  batch.out_stride = batch.heads * batch.kv.value_dim();
  batch.block_table = block_table.data();
  batch.starts = starts.data();
  batch.kv_lens = kv_lens.data();
  batch.scale = scale;
  batch.window = window;
  batch.soft_cap = soft_cap;
  if (sinks) {
    require(static_cast<int64_t>(sinks->shape(0)) == batch.heads, "sinks must have one value a head");
    batch.sinks = sinks->data();
  }
  nb::gil_scoped_release release;
  pdserve::Attention attention;
  attention.plan(batch, context.kernels, context.pool.threads());
  attention.run(context.pool, context.kernels, batch);
}

}  // namespace

void bind_attention(nb::module_& m) {
  m.def("kv_block_bytes",
        [](const std::string& type, int64_t kv_heads, int64_t block_size, int64_t head_dim,
           int64_t latent) {
          return sized(type, kv_heads, block_size, head_dim, latent).block_bytes;
        },
        nb::arg("type"), nb::arg("kv_heads"), nb::arg("block_size"), nb::arg("head_dim"),
        nb::arg("latent") = 0,
        "Bytes of a block of one layer; type: float32, bfloat16, float16 or int8; latent: how many\n"
        "values at the end of a key are its value, 0 if values are stored too.");
  m.def("write_kv", &write_kv, nb::arg("context"), nb::arg("kv").noconvert(), nb::arg("type"),
        nb::arg("block_size"), nb::arg("k").noconvert(), nb::arg("v").noconvert().none(),
        nb::arg("slots").noconvert(), nb::arg("latent") = 0,
        "Stores k, v float32 [tokens, kv_heads, head_dim] at slots int64 [tokens] of kv uint8\n"
        "[blocks, kv_block_bytes]; of a latent layer v is None.");
  m.def("paged_attention", &paged_attention, nb::arg("context"), nb::arg("q").noconvert(),
        nb::arg("kv").noconvert(), nb::arg("type"), nb::arg("kv_heads"), nb::arg("block_size"),
        nb::arg("block_table").noconvert(), nb::arg("starts").noconvert(),
        nb::arg("kv_lens").noconvert(), nb::arg("scale"), nb::arg("window"), nb::arg("soft_cap"),
        nb::arg("out").noconvert(), nb::arg("sinks").noconvert() = nb::none(),
        nb::arg("latent") = 0,
        "Causal attention of q float32 [tokens, heads, head_dim] into out: row r's tokens are\n"
        "[starts[r], starts[r + 1]), the last at position kv_lens[r] - 1; block_table int64\n"
        "[rows, blocks]. window: keys seen, 0 for all; soft_cap: 0 for none;\n"
        "sinks float32 [heads]: scores beside those of the keys.");
}
