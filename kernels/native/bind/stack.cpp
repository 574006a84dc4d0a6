// Stack: a model's layers, built once, then a step a call.
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "decoder/stack.h"
#include "bind.h"

namespace {

using pdserve::Layer;
using pdserve::Matrix;
using pdserve::Norm;
using pdserve::Product;
using pdserve::Stack;
using Floats = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Table = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdTable = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

std::vector<float> floats(nb::handle value, int64_t length, const char* what) {
  if (value.is_none()) return {};
  auto array = nb::cast<Floats>(value);
  if (static_cast<int64_t>(array.shape(0)) != length) {
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(array.shape(0)) +
                                " values, not " + std::to_string(length));
  }
  return {array.data(), array.data() + length};
}

Product product(nb::handle parts, nb::handle bias, int64_t cols, int64_t outputs,
                const char* what) {
  Product made;
  made.parts = nb::cast<std::vector<Matrix>>(parts);
  require(!made.parts.empty() && made.parts.size() <= pdserve::kMaxParts, "1 to 8 matrices");
  for (const Matrix& part : made.parts) {
    if (part.cols != cols) {
      throw std::invalid_argument(std::string(what) + " has " + std::to_string(part.cols) +
                                  " inputs, not " + std::to_string(cols));
    }
  }
  if (made.outputs() != outputs) {
    throw std::invalid_argument(std::string(what) + " has " + std::to_string(made.outputs()) +
                                " outputs, not " + std::to_string(outputs));
  }
  made.bias = floats(bias, outputs, what);
  return made;
}

pdserve::Activation activation(const std::string& name) {
  if (name == "silu") return pdserve::Activation::kSilu;
  if (name == "gelu_tanh") return pdserve::Activation::kGeluTanh;
  if (name == "gelu") return pdserve::Activation::kGelu;
  throw std::invalid_argument("activation '" + name + "'; known: silu, gelu_tanh, gelu");
}

pdserve::KvType kv_type(const std::string& name) {
  if (name == "float32") return pdserve::KvType::kF32;
  if (name == "bfloat16") return pdserve::KvType::kBf16;
  if (name == "float16") return pdserve::KvType::kF16;
  if (name == "int8") return pdserve::KvType::kI8;
  throw std::invalid_argument("KV type '" + name + "'; known: float32, bfloat16, float16, int8");
}

// The arrays that a Stack's memory depends on are kept alive beside it.
struct Model {
  nb::object context;
  Stack stack;
  std::vector<nb::object> pools;  // the KV memory of each layer
  std::vector<int64_t> num_blocks;

  Model(nb::object owner, const pdserve::Shape& shape)
      : context(owner),
        stack(nb::cast<Context&>(owner).pool, nb::cast<Context&>(owner).kernels, shape) {}
};

void add_layer(Model& model, int64_t group, int64_t window, int64_t rope, nb::dict norms,
               nb::dict weights, nb::dict biases) {
  pdserve::Shape shape = model.stack.shape();
  require(rope >= 0 && rope < static_cast<int64_t>(model.stack.ropes.size()), "no such rope table");
  require(window >= 0 && group >= 0, "window and group count from 0");
  auto norm = [&](const char* name, int64_t length) {
    return norms.contains(name) ? floats(norms[name], length, name) : Norm{};
  };
  auto linear = [&](const char* name, int64_t cols, int64_t outputs) {
    nb::object bias = biases.contains(name) ? nb::object(biases[name]) : nb::none();
    return product(weights[name], bias, cols, outputs, name);
  };
  int64_t q = shape.heads * shape.head_dim, kv = shape.kv_heads * shape.head_dim;
  Layer layer;
  layer.group = group;
  layer.window = window;
  layer.rope = rope;
  layer.attn_in = norm("attn_in", shape.hidden);
  layer.attn_out = norm("attn_out", shape.hidden);
  layer.ffn_in = norm("ffn_in", shape.hidden);
  layer.ffn_out = norm("ffn_out", shape.hidden);
  layer.q_norm = norm("q_norm", shape.head_dim);
  layer.k_norm = norm("k_norm", shape.head_dim);
  layer.qkv = linear("qkv", shape.hidden, q + 2 * kv);
  layer.out = linear("out", q, shape.hidden);
  layer.gate_up = linear("gate_up", shape.hidden, 2 * shape.ffn);
  layer.down = linear("down", shape.ffn, shape.hidden);
  model.stack.layers.push_back(std::move(layer));
}

void set_kv(Model& model, std::vector<nb::object> pools, const std::string& type,
            int64_t block_size) {
  pdserve::Shape shape = model.stack.shape();
  require(pools.size() == model.stack.layers.size(), "one KV array a layer");
  require(block_size > 0 && block_size % pdserve::kLanes == 0,
          "the block size must be a multiple of 16");
  model.num_blocks.clear();
  for (size_t i = 0; i < pools.size(); ++i) {
    auto pool = nb::cast<nb::ndarray<uint8_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>>(pools[i]);
    pdserve::KvLayer& kv = model.stack.layers[i].kv;
    kv.data = pool.data();
    kv.type = kv_type(type);
    kv.block_size = block_size;
    kv.kv_heads = shape.kv_heads;
    kv.head_dim = shape.head_dim;
    kv.block_bytes = static_cast<int64_t>(pool.shape(1));
    require(kv.block_bytes == pdserve::kv_block_bytes(kv), "blocks of another size");
    model.num_blocks.push_back(static_cast<int64_t>(pool.shape(0)));
  }
  model.pools = std::move(pools);
}

// Everything that is used as an index is in range: a wrong plan raises instead of corrupting.
void check(const Model& model, const pdserve::StepBatch& batch, size_t num_outputs) {
  const Stack& stack = model.stack;
  require(!model.pools.empty(), "no KV cache is set");
  const pdserve::KvLayer& kv = stack.layers.front().kv;
  for (int64_t t = 0; t < batch.tokens; ++t) {
    require(batch.token_ids[t] >= 0 && batch.token_ids[t] < stack.embedding.rows, "token id");
    require(batch.positions[t] >= 0, "position");
    for (const pdserve::RopeTable& rope : stack.ropes) {
      require((batch.positions[t] + 1) * rope.half <= static_cast<int64_t>(rope.cos.size()),
              "a position beyond the rope table");
    }
  }
  require(batch.starts[0] == 0 && batch.starts[batch.rows] == batch.tokens, "starts");
  int64_t longest = 0;
  for (int64_t r = 0; r < batch.rows; ++r) {
    int64_t tokens = batch.starts[r + 1] - batch.starts[r];
    require(tokens > 0 && batch.kv_lens[r] >= tokens, "a row's tokens and keys");
    longest = std::max(longest, batch.kv_lens[r]);
  }
  for (size_t i = 0; i < num_outputs; ++i) {
    require(batch.outputs[i] >= 0 && batch.outputs[i] < batch.tokens, "logit_tokens");
  }
  for (size_t n = 0; n < stack.layers.size(); ++n) {
    require(stack.layers[n].group < static_cast<int64_t>(batch.groups.size()), "a group is missing");
  }
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    int64_t blocks = 0;
    for (size_t n = 0; n < stack.layers.size(); ++n) {
      if (stack.layers[n].group == static_cast<int64_t>(g)) blocks = model.num_blocks[n];
    }
    const pdserve::StepGroup& group = batch.groups[g];
    require(group.width * kv.block_size >= longest, "a block table is too narrow");
    for (int64_t i = 0; i < batch.rows * group.width; ++i) {
      require(group.block_table[i] >= 0 && group.block_table[i] < blocks, "a block outside the pool");
    }
    for (int64_t t = 0; t < batch.tokens; ++t) {
      require(group.slots[t] >= 0 && group.slots[t] < blocks * kv.block_size,
              "a slot outside the pool");
    }
  }
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> forward(Model& model, Ids token_ids, Ids positions,
                                                   const std::vector<int64_t>& starts,
                                                   const std::vector<int64_t>& kv_lens,
                                                   const std::vector<IdTable>& tables,
                                                   const std::vector<Ids>& slots, Ids outputs,
                                                   bool kv_only) {
  pdserve::StepBatch batch;
  batch.tokens = static_cast<int64_t>(token_ids.shape(0));
  batch.rows = static_cast<int64_t>(kv_lens.size());
  require(batch.tokens > 0 && batch.rows > 0, "an empty batch");
  require(static_cast<int64_t>(positions.shape(0)) == batch.tokens, "one position a token");
  require(starts.size() == kv_lens.size() + 1, "rows + 1 starts");
  require(tables.size() == slots.size(), "a table and slots for each group");
  batch.token_ids = token_ids.data();
  batch.positions = positions.data();
  batch.starts = starts.data();
  batch.kv_lens = kv_lens.data();
  for (size_t g = 0; g < tables.size(); ++g) {
    require(static_cast<int64_t>(tables[g].shape(0)) == batch.rows, "a block table row a row");
    require(static_cast<int64_t>(slots[g].shape(0)) == batch.tokens, "one slot a token");
    batch.groups.push_back({tables[g].data(), static_cast<int64_t>(tables[g].shape(1)),
                            slots[g].data()});
  }
  batch.outputs = outputs.data();
  size_t count = kv_only ? 0 : outputs.shape(0);
  batch.num_outputs = static_cast<int64_t>(count);
  check(model, batch, count);
  size_t hidden = static_cast<size_t>(model.stack.shape().hidden);
  auto out = std::make_unique<float[]>(count * hidden + 1);
  {
    nb::gil_scoped_release release;
    model.stack.forward(batch, out.get());
  }
  float* data = out.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return {data, {count, hidden}, owner};
}

void logits(Model& model, Table hidden, nb::ndarray<float, nb::ndim<2>, nb::c_contig, nb::device::cpu> out) {
  require(static_cast<int64_t>(hidden.shape(1)) == model.stack.shape().hidden, "hidden size");
  require(out.shape(0) == hidden.shape(0), "a row of logits for each hidden state");
  require(static_cast<int64_t>(out.shape(1)) == model.stack.head.outputs(), "vocabulary size");
  nb::gil_scoped_release release;
  model.stack.logits(hidden.data(), static_cast<int64_t>(hidden.shape(0)), out.data());
}

}  // namespace

void bind_stack(nb::module_& m) {
  nb::class_<Model>(m, "Stack", "A model's layers; a step of a batch is one call.")
      .def("__init__",
           [](Model* self, nb::object context, int64_t hidden, int64_t heads, int64_t kv_heads,
              int64_t head_dim, int64_t ffn, float eps, float attn_scale, float attn_soft_cap,
              float logit_soft_cap, float embed_scale, const std::string& act) {
             require(hidden > 0 && heads > 0 && kv_heads > 0 && head_dim > 0 && ffn > 0,
                     "sizes are positive");
             require(heads % kv_heads == 0, "heads must be a multiple of kv_heads");
             pdserve::Shape shape{hidden,        heads,          kv_heads,    head_dim,
                                  ffn,           eps,            attn_scale,  attn_soft_cap,
                                  logit_soft_cap, embed_scale,   activation(act)};
             new (self) Model(context, shape);
           },
           nb::arg("context"), nb::kw_only(), nb::arg("hidden"), nb::arg("heads"),
           nb::arg("kv_heads"), nb::arg("head_dim"), nb::arg("ffn"), nb::arg("eps"),
           nb::arg("attn_scale"), nb::arg("attn_soft_cap"), nb::arg("logit_soft_cap"),
           nb::arg("embed_scale"), nb::arg("activation"))
      .def("set_embedding",
           [](Model& model, const Matrix& matrix) {
             require(matrix.cols == model.stack.shape().hidden, "embedding width");
             model.stack.embedding = matrix;
           },
           nb::arg("matrix"))
      .def("set_head",
           [](Model& model, nb::handle norm, const Matrix& matrix) {
             require(matrix.cols == model.stack.shape().hidden, "head width");
             model.stack.norm = floats(norm, model.stack.shape().hidden, "norm");
             require(!model.stack.norm.empty(), "the last norm is missing");
             model.stack.head.parts = {matrix};
           },
           nb::arg("norm"), nb::arg("matrix"))
      .def("set_rope",
           [](Model& model, size_t index, Table cos, Table sin) {
             require(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1), "cos and sin");
             require(static_cast<int64_t>(2 * cos.shape(1)) <= model.stack.shape().head_dim,
                     "more rotating dims than a head has");
             if (model.stack.ropes.size() <= index) model.stack.ropes.resize(index + 1);
             pdserve::RopeTable& rope = model.stack.ropes[index];
             rope.half = static_cast<int64_t>(cos.shape(1));
             rope.cos.assign(cos.data(), cos.data() + cos.size());
             rope.sin.assign(sin.data(), sin.data() + sin.size());
           },
           nb::arg("index"), nb::arg("cos"), nb::arg("sin"),
           "Table `index` of cosines and sines, float32 [positions, half]; may be set again.")
      .def("add_layer", &add_layer, nb::kw_only(), nb::arg("group"), nb::arg("window"),
           nb::arg("rope"), nb::arg("norms"), nb::arg("weights"), nb::arg("biases"),
           "norms: attn_in, attn_out, ffn_in, ffn_out, q_norm, k_norm, as far as there are any;\n"
           "weights: lists of Matrix qkv, out, gate_up, down; biases: of some of these.")
      .def("set_kv", &set_kv, nb::arg("pools"), nb::arg("dtype"), nb::arg("block_size"),
           "pools: a layer's blocks as uint8 [blocks, bytes], one a layer; kept alive here.")
      .def("forward", &forward, nb::arg("token_ids"), nb::arg("positions"), nb::arg("starts"),
           nb::arg("kv_lens"), nb::arg("block_tables"), nb::arg("slots"), nb::arg("outputs"),
           nb::arg("kv_only"),
           "Writes the tokens' KV; the last hidden states float32 [outputs, hidden], normed.\n"
           "ValueError for any index that is out of range.")
      .def_prop_ro("shares", [](const Model& model) { return model.stack.shares(); },
                   "In how many shares the threads took the rows of the last step through all\n"
                   "layers; 0: they shared every operation.")
      .def("logits", &logits, nb::arg("hidden"), nb::arg("out"),
           "Writes the logits of hidden states float32 [n, hidden] to out [n, vocabulary].");
}
