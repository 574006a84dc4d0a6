// Stack: a model's layers, built once; each call computes one step.
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>

#include "decoder/stack.h"
#include "parts.h"

namespace {

using pdserve::AttentionPart;
using pdserve::Matrix;
using pdserve::Stack;
using Table = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;
using Vector = nb::ndarray<const float, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Ids = nb::ndarray<const int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using IdTable = nb::ndarray<const int64_t, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

using KvArray = Array<uint8_t, 2>;

// A Stack, and the arrays whose memory it uses and must keep alive.
struct Model {
  nb::object context;
  Stack stack;
  std::vector<KvArray> pools;        // the KV memory of each layer
  std::vector<int64_t> num_blocks;   // of each group: the number that all of its layers have
  int64_t block_size = 0;
  size_t num_layers = 0;

  Model(nb::object owner, int64_t hidden, float embed_scale, float logit_scale,
        float logit_soft_cap)
      : context(owner),
        stack(nb::cast<Context&>(owner).pool, nb::cast<Context&>(owner).kernels, hidden,
              embed_scale, logit_scale, logit_soft_cap) {}
};

void add_layer(Model& model, const std::vector<std::pair<std::string, nb::dict>>& parts) {
  pdserve::Parts made;
  for (const auto& [kind, fields] : parts) {
    const std::string name = "layer " + std::to_string(model.num_layers) + ", part " +
                             std::to_string(made.size()) + " (" + kind + ")";
    made.push_back(make_part(name, kind, fields, model.stack));
  }
  model.stack.add_layer(std::move(made));
  ++model.num_layers;
}

void set_rope(Model& model, size_t index, Table cos, Table sin) {
  require(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1),
          "cos and sin must have one shape");
  require(index <= model.stack.ropes.size(), "rope tables are set in order");
  if (index == model.stack.ropes.size()) model.stack.ropes.emplace_back();
  pdserve::RopeTable& rope = model.stack.ropes[index];
  const auto half = static_cast<int64_t>(cos.shape(1));
  require(half > 0 && (rope.half == 0 || rope.half == half),
          "a rope table must keep its number of rotating dims");
  rope.half = half;
  rope.cos.assign(cos.data(), cos.data() + cos.size());
  rope.sin.assign(sin.data(), sin.data() + sin.size());
}

// Leaves the model unchanged if it throws.
void set_kv(Model& model, std::vector<KvArray> pools, const std::string& type,
            int64_t block_size) {
  const std::vector<AttentionPart*>& attentions = model.stack.attentions();
  require(pools.size() == attentions.size(), "one KV array a layer");
  std::vector<pdserve::KvLayer> layers;
  std::vector<int64_t> num_blocks;
  for (size_t i = 0; i < pools.size(); ++i) {
    const AttentionPart& attention = *attentions[i];
    layers.push_back(kv_layer(pools[i].data(), static_cast<int64_t>(pools[i].shape(1)), type,
                              attention.kv_heads, block_size, attention.head_dim,
                              attention.latent));
    const auto group = static_cast<size_t>(attention.group);
    if (num_blocks.size() <= group) num_blocks.resize(group + 1, INT64_MAX);
    num_blocks[group] = std::min(num_blocks[group], static_cast<int64_t>(pools[i].shape(0)));
  }
  for (size_t i = 0; i < layers.size(); ++i) attentions[i]->kv = layers[i];
  model.pools = std::move(pools);
  model.num_blocks = std::move(num_blocks);
  model.block_size = block_size;
}

// Checks that every index is in range, so that a wrong plan raises instead of corrupting memory.
void check(const Model& model, const pdserve::StepBatch& batch) {
  const Stack& stack = model.stack;
  const int64_t block_size = model.block_size;
  const int64_t added_rows = static_cast<int64_t>(stack.added.size()) / stack.hidden();
  for (int64_t t = 0; t < batch.tokens; ++t) {
    require(batch.token_ids[t] >= 0 && batch.token_ids[t] < stack.embedding.rows, "token id");
    require(batch.positions[t] >= 0, "position");
    require(!batch.added_ids || (batch.added_ids[t] >= 0 && batch.added_ids[t] < added_rows),
            "a row of the added embedding");
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
  // A step's buffers hold one row per token.
  require(batch.num_outputs <= batch.tokens, "more outputs than tokens");
  for (int64_t i = 0; i < batch.num_outputs; ++i) {
    require(batch.outputs[i] >= 0 && batch.outputs[i] < batch.tokens, "logit_tokens");
  }
  require(batch.groups.size() == model.num_blocks.size(), "tables and slots for each group");
  for (size_t g = 0; g < batch.groups.size(); ++g) {
    const int64_t blocks = model.num_blocks[g];
    if (blocks == INT64_MAX) continue;  // no layer has this group
    const pdserve::StepGroup& group = batch.groups[g];
    require(group.width * block_size >= longest, "a block table is too narrow");
    for (int64_t i = 0; i < batch.rows * group.width; ++i) {
      require(group.block_table[i] >= 0 && group.block_table[i] < blocks, "a block outside the pool");
    }
    for (int64_t t = 0; t < batch.tokens; ++t) {
      require(group.slots[t] >= 0 && group.slots[t] < blocks * block_size,
              "a slot outside the pool");
    }
  }
}

nb::ndarray<nb::numpy, float, nb::ndim<2>> forward(Model& model, Ids token_ids, Ids positions,
                                                   const std::vector<int64_t>& starts,
                                                   const std::vector<int64_t>& kv_lens,
                                                   const std::vector<IdTable>& tables,
                                                   const std::vector<Ids>& slots, Ids outputs,
                                                   bool kv_only,
                                                   const std::optional<Ids>& added_ids) {
  require(model.stack.complete(), "the head is not set");
  require(model.stack.embedding.rows > 0, "the embedding is not set");
  require(!model.pools.empty(), "no KV cache is set");
  pdserve::StepBatch batch;
  batch.tokens = static_cast<int64_t>(token_ids.shape(0));
  batch.rows = static_cast<int64_t>(kv_lens.size());
  require(batch.tokens > 0 && batch.rows > 0, "an empty batch");
  require(static_cast<int64_t>(positions.shape(0)) == batch.tokens, "one position a token");
  require(starts.size() == kv_lens.size() + 1, "rows + 1 starts");
  require(tables.size() == slots.size(), "a table and slots for each group");
  batch.token_ids = token_ids.data();
  batch.positions = positions.data();
  require(added_ids.has_value() != model.stack.added.empty(),
          "added_ids, if an added embedding is set, and only then");
  if (added_ids) {
    require(static_cast<int64_t>(added_ids->shape(0)) == batch.tokens, "one added id a token");
    batch.added_ids = added_ids->data();
  }
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
  check(model, batch);
  size_t hidden = static_cast<size_t>(model.stack.hidden());
  auto out = std::make_unique<float[]>(count * hidden + 1);
  {
    nb::gil_scoped_release release;
    model.stack.forward(batch, out.get());
  }
  float* data = out.release();
  nb::capsule owner(data, [](void* p) noexcept { delete[] static_cast<float*>(p); });
  return {data, {count, hidden}, owner};
}

void logits(Model& model, Table hidden, Array<float, 2> out) {
  require(model.stack.complete(), "the head is not set");
  require(static_cast<int64_t>(hidden.shape(1)) == model.stack.hidden(), "hidden size");
  require(out.shape(0) == hidden.shape(0), "a row of logits for each hidden state");
  require(static_cast<int64_t>(out.shape(1)) == model.stack.vocabulary(), "vocabulary size");
  nb::gil_scoped_release release;
  model.stack.logits(hidden.data(), static_cast<int64_t>(hidden.shape(0)), out.data());
}

}  // namespace

void bind_stack(nb::module_& m) {
  nb::class_<Model>(m, "Stack", "A model's layers; a step of a batch is one call.")
      .def("__init__",
           [](Model* self, nb::object context, int64_t hidden, float embed_scale, float logit_scale,
              float logit_soft_cap) {
             require(hidden > 0 && hidden <= 1 << 24, "hidden must be 1 to 2^24");
             new (self) Model(context, hidden, embed_scale, logit_scale, logit_soft_cap);
           },
           nb::arg("context"), nb::kw_only(), nb::arg("hidden"), nb::arg("embed_scale"),
           nb::arg("logit_scale"), nb::arg("logit_soft_cap"))
      .def("set_embedding",
           [](Model& model, const Matrix& matrix) {
             require(matrix.cols == model.stack.hidden(), "embedding width");
             model.stack.embedding = matrix;
           },
           nb::arg("matrix"))
      .def("set_added_embedding",
           [](Model& model, Table rows) {
             require(static_cast<int64_t>(rows.shape(1)) == model.stack.hidden(),
                     "embedding width");
             model.stack.added.assign(rows.data(), rows.data() + rows.size());
           },
           nb::arg("rows"),
           "A second embedding, float32 [n, hidden]: to that of each token, its row is added that\n"
           "added_ids of the step names.")
      .def("set_rope", &set_rope, nb::arg("index"), nb::arg("cos"), nb::arg("sin"),
           "Table `index` of cosines and sines, float32 [positions, half]; may be set again, longer.")
      .def("add_layer", &add_layer, nb::arg("parts"),
           "The next layer: (kind, fields) of each of its parts, in the order of a row's way. A\n"
           "row's value is the residual stream at first, and each part makes the next value of it:\n"
           "norm: weight [values], eps. layer_norm: the same, bias [values] or None.\n"
           "linear: matrices, side by side; bias [outputs] or None. reorder: order int64 [values].\n"
           "head_norm: weight [head_dim], eps, begin (a value of the row), heads.\n"
           "rope, before attention: table, heads, head_dim, begin.\n"
           "head_linear: matrices, one a head; kept, values of each head that stay before its outputs.\n"
           "attention, of q, k and v: heads, kv_heads, head_dim, scale, soft_cap (0: none), window (0:\n"
           "all), causal (1, or 0: later keys are seen too), group (of block tables), sinks [heads] or\n"
           "None, latent: 0, or how many values at the end of a key are its value, and there is no v.\n"
           "gate, of gate and up: activation. activate: activation. scale: factor.\n"
           "xielu: a, b, beta, eps.\n"
           "experts: router [experts, values] in a list, behind it a shared expert's gate [1, values]\n"
           "if it has one; bias and correction [experts] or None; gates, ups, downs: a matrix an\n"
           "expert; gate_up_biases [experts, outputs] and down_biases [experts, values] or None;\n"
           "shared: gate, up and down, or nothing; top_k, sigmoid, normalized, scale, groups,\n"
           "kept_groups, group_best; activation.\n"
           "hold, behind attention: keeps the value, which is the stream again.\n"
           "replace: the value becomes the stream.\n"
           "add: to the stream; held: 1 if what is held is added, too.\n"
           "ValueError names the part that has wrong fields or does not fit the one before it.")
      .def("set_head",
           [](Model& model, const std::pair<std::string, nb::dict>& norm, const Matrix& matrix,
              std::optional<Vector> bias) {
             std::vector<float> added;
             if (bias) added.assign(bias->data(), bias->data() + bias->size());
             model.stack.set_head(make_part("the last norm", norm.first, norm.second, model.stack),
                                  pdserve::LinearPart({matrix}, std::move(added)));
           },
           nb::arg("norm"), nb::arg("matrix"), nb::arg("bias") = nb::none(),
           "After all layers. norm: (kind, fields) of a norm; matrix, bias [vocabulary] or None: of\n"
           "the logits.")
      .def("set_kv", &set_kv, array("pools"), nb::arg("dtype"), nb::arg("block_size"),
           "pools: a layer's blocks as uint8 [blocks, bytes], one a layer; kept alive here.\n"
           "ValueError for sizes that do not fit the layers.")
      .def("forward", &forward, nb::arg("token_ids"), nb::arg("positions"), nb::arg("starts"),
           nb::arg("kv_lens"), nb::arg("block_tables"), nb::arg("slots"), nb::arg("outputs"),
           nb::arg("kv_only"), nb::arg("added_ids") = nb::none(),
           "Writes the tokens' KV; the last hidden states float32 [outputs, hidden], normed.\n"
           "ValueError for any index that is out of range.")
      .def_prop_ro("shares", [](const Model& model) { return model.stack.shares(); },
                   "How many threads took rows of their own through all layers in the last step;\n"
                   "0: the threads shared every operation.")
      .def("logits", &logits, nb::arg("hidden"), array("out"),
           "Writes the logits of hidden states float32 [n, hidden] to out [n, vocabulary].");
}
