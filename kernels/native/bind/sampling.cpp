// Sampling for Python: one call samples the tokens of a whole step, in parallel over the rows.
#include "bind.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unordered_map.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <optional>
#include <unordered_map>
#include <vector>

namespace {

using pdserve::Filter;
using pdserve::NoiseKey;

constexpr double kGreedyBelow = 1e-5;  // lower temperatures count as 0, as in the reference

int64_t to_int(nb::handle object) {
  int64_t value;
  if (!nb::try_cast(object, value)) throw nb::type_error("an integer of 64 bits is needed");
  return value;
}

// The sampling state of one choice: its parameters and the counts of its ids. The order of the
// edits and their rounding are those of kernels/reference/sampling.py.
class Stream {
 public:
  int64_t vocab = 0;
  double temperature = 0;
  Filter filter;
  uint64_t seed = 0;
  int64_t choice = 0;
  float repetition = 1, presence = 0, frequency = 0;
  int64_t window = 0;  // number of last ids of prompt and output that penalties cover; 0: no window
  std::vector<std::pair<int64_t, float>> bias;
  std::vector<int64_t> masked;
  int64_t min_tokens = 0;

  bool greedy() const { return temperature < kGreedyBelow; }
  bool edits() const { return !bias.empty() || counts() || masks(); }
  int64_t position() const { return position_; }

  NoiseKey key() const { return {static_cast<int64_t>(seed), choice, position_}; }

  // With a window, prompt ids are counted; without one, they are marked as seen with a count of 0.
  void see_prompt(const std::vector<int64_t>& ids) {
    if (window ? !counts() : repetition == 1) return;
    for (int64_t id : ids) {
      if (window) {
        count(id);
      } else {
        tally(id);
      }
    }
  }

  // Counts the generated ids since the last call. Needs the GIL.
  void follow(nb::handle generated) {
    require(PyList_Check(generated.ptr()), "generated must be a list of lists");
    int64_t length = PyList_GET_SIZE(generated.ptr());
    require(length >= position_, "generated is shorter than it was");
    if (counts()) {
      for (int64_t i = position_; i < length; ++i) {
        count(to_int(PyList_GET_ITEM(generated.ptr(), i)));
        position_ = i + 1;
      }
    }
    position_ = length;
  }

  // Edits one row of scores in place.
  void apply(float* scores) const {
    for (auto [id, value] : bias) scores[id] += value;
    for (const Tally& t : tallies_) {
      float score = scores[t.id];
      if (repetition != 1) score = score > 0 ? score / repetition : score * repetition;
      if (t.count) {
        score -= presence;
        score -= frequency * static_cast<float>(t.count);
      }
      scores[t.id] = score;
    }
    if (!masks()) return;
    for (int64_t id : masked) scores[id] = -INFINITY;
  }

  void check(int64_t id) const {
    require(id >= 0 && id < vocab, "a token id is outside the vocabulary");
  }

 private:
  struct Tally {
    int64_t id;
    int64_t count;
  };

  bool counts() const { return repetition != 1 || presence != 0 || frequency != 0; }
  bool masks() const { return !masked.empty() && position_ < min_tokens; }

  size_t tally(int64_t id) {
    check(id);
    auto [entry, fresh] = index_.try_emplace(id, tallies_.size());
    if (fresh) tallies_.push_back({id, 0});
    return entry->second;
  }

  // Counts one more id, and stops counting the id that leaves the window.
  void count(int64_t id) {
    ++tallies_[tally(id)].count;
    if (!window) return;
    recent_.push_back(id);
    if (static_cast<int64_t>(recent_.size()) <= window) return;
    auto left = index_.find(recent_.front());
    recent_.pop_front();
    Tally& none = tallies_[left->second];
    if (--none.count) return;
    none = tallies_.back();
    index_[none.id] = left->second;
    tallies_.pop_back();
    index_.erase(left);
  }

  int64_t position_ = 0;
  std::deque<int64_t> recent_;  // the ids in the window
  std::vector<Tally> tallies_;  // of the ids that penalties affect
  std::unordered_map<int64_t, size_t> index_;
};

// Masks with at most this many tokens, such as those between the strings of a JSON schema, are
// sampled over these tokens only.
constexpr int64_t kMaxSparse = 256;

// Writes the mask's ids in order and returns their number; -1 if there are more than kMaxSparse.
int64_t sparse_ids(const uint32_t* words, int64_t vocab, int64_t* ids) {
  int64_t count = 0;
  for (int64_t start = 0; start < vocab; start += 32) {
    for (uint32_t word = words[start / 32]; word; word &= word - 1) {
      int64_t id = start + __builtin_ctz(word);
      if (id >= vocab) break;
      if (count == kMaxSparse) return -1;
      ids[count++] = id;
    }
  }
  return count;
}

struct Ranked {
  float score;
  int64_t id;
};

// Samples tokens on a context's threads; owns their scratch memory.
class NativeSampler {
 public:
  explicit NativeSampler(Context& context) : context_(context), scratch_(context.pool.threads()) {}

  nb::list sample(const Array<const float, 2>& logits, nb::list rows, nb::list streams,
                  nb::list generated, std::optional<nb::list> masks) {
    size_t count = rows.size();
    int64_t vocab = static_cast<int64_t>(logits.shape(1));
    require(streams.size() == count && generated.size() == count,
            "rows, streams and generated must have the same length");
    require(!masks || masks->size() == count, "masks must be as many as streams");
    require(vocab > 0, "logits need a vocabulary");
    draws_.clear();
    bool scratch = false;
    for (size_t i = 0; i < count; ++i) {
      int64_t row = to_int(rows[i]);
      require(row >= 0 && row < static_cast<int64_t>(logits.shape(0)), "no such row of logits");
      Stream* stream = nullptr;
      if (!nb::try_cast(streams[i], stream) || !stream) throw nb::type_error("not a Stream");
      require(stream->vocab == vocab, "the stream is for another vocabulary");
      stream->follow(generated[i]);
      const uint32_t* mask = masks ? mask_of((*masks)[i], vocab) : nullptr;
      scratch |= mask || stream->edits() || stream->filter.active();
      draws_.push_back({logits.data() + row * vocab, stream, mask, -1});
    }
    if (scratch) reserve(vocab + context_.kernels.filter_scratch(vocab));
    {
      nb::gil_scoped_release release;
      context_.pool.run(static_cast<int64_t>(count), [&](int64_t i, int worker) {
        draws_[i].token = sample_token(draws_[i], vocab, scratch_[worker].data());
      });
    }
    nb::list tokens;
    for (const Draw& draw : draws_) tokens.append(draw.token);
    return tokens;
  }

  nb::list logprobs(const Array<const float, 2>& logits, nb::list tokens, int64_t best,
                    const std::vector<int64_t>& also) {
    int64_t rows = static_cast<int64_t>(logits.shape(0));
    int64_t vocab = static_cast<int64_t>(logits.shape(1));
    require(static_cast<int64_t>(tokens.size()) == rows, "logits and tokens differ in length");
    require(best >= 0 && best <= vocab, "count must be 0 to the size of the vocabulary");
    std::vector<int64_t> ids;
    for (nb::handle token : tokens) {
      ids.push_back(to_int(token));
      require(ids.back() >= 0 && ids.back() < vocab, "a token id is outside the vocabulary");
    }
    for (int64_t id : also) require(id >= 0 && id < vocab, "an id is outside the vocabulary");
    std::vector<double> totals(rows);
    std::vector<std::vector<Ranked>> ranked(rows);
    for (auto& list : ranked) list.resize(best);
    if (best) reserve(context_.kernels.filter_scratch(vocab));
    {
      nb::gil_scoped_release release;
      context_.pool.run(rows, [&](int64_t row, int worker) {
        const float* scores = logits.data() + row * vocab;
        totals[row] = total(scores, vocab);
        if (best) rank(scores, vocab, scratch_[worker].data(), ranked[row]);
      });
    }
    nb::list found;
    for (int64_t row = 0; row < rows; ++row) {
      nb::list pairs;
      for (const Ranked& r : ranked[row]) {
        pairs.append(nb::make_tuple(r.id, static_cast<double>(r.score) - totals[row]));
      }
      const float* scores = logits.data() + row * vocab;
      for (int64_t id : also) {
        pairs.append(nb::make_tuple(id, static_cast<double>(scores[id]) - totals[row]));
      }
      double own = static_cast<double>(scores[ids[row]]) - totals[row];
      found.append(nb::make_tuple(own, nb::tuple(pairs)));
    }
    return found;
  }

 private:
  struct Draw {
    const float* scores;
    const Stream* stream;
    const uint32_t* mask;  // null: all tokens are allowed
    int64_t token;
  };

  // Returns the mask's words, which live as long as the list that holds the mask; null for None.
  static const uint32_t* mask_of(nb::handle object, int64_t vocab) {
    if (object.is_none()) return nullptr;
    Array<const uint32_t, 1> words;
    if (!nb::try_cast(object, words, false)) throw nb::type_error("a mask has words of 32 bits");
    require(static_cast<int64_t>(words.shape(0)) == (vocab + 31) / 32,
            "a mask needs a bit for every token");
    return words.data();
  }

  void reserve(int64_t floats) {
    for (auto& each : scratch_) {
      if (static_cast<int64_t>(each.size()) < floats) each.resize(floats);
    }
  }

  // Returns the sampled token; -1 if the best score is not finite.
  int64_t sample_token(const Draw& draw, int64_t vocab, float* scratch) const {
    const pdserve::Kernels& k = context_.kernels;
    const Stream& stream = *draw.stream;
    const float* scores = draw.scores;
    if (draw.mask && !stream.edits() && !stream.filter.active()) {
      int64_t ids[kMaxSparse];
      int64_t count = sparse_ids(draw.mask, vocab, ids);
      if (count >= 0) return sample_sparse(ids, count, scores, stream);
    }
    if (draw.mask || stream.edits()) {
      if (draw.mask) {
        k.apply_bitmask(scores, draw.mask, vocab, scratch);
      } else {
        std::copy(scores, scores + vocab, scratch);
      }
      stream.apply(scratch);
      scores = scratch;
      scratch += vocab;
    }
    int64_t best = k.argmax(scores, vocab);
    if (!std::isfinite(scores[best])) return -1;
    if (stream.greedy()) return best;
    float temperature = static_cast<float>(stream.temperature), floor = -INFINITY;
    if (stream.filter.active()) {
      floor = k.filter_floor(scores, temperature, stream.filter, vocab, scratch);
    }
    return k.gumbel_argmax(scores, temperature, floor, stream.key(), vocab);
  }

  // Samples like `sample_token` among the tokens of a sparse mask, in the order of their ids.
  int64_t sample_sparse(const int64_t* ids, int64_t count, const float* scores,
                      const Stream& stream) const {
    int64_t best = -1;
    for (int64_t i = 0; i < count; ++i) {
      float score = scores[ids[i]];
      if (std::isnan(score)) return -1;
      if (best < 0 || score > scores[best]) best = ids[i];
    }
    if (best < 0 || !std::isfinite(scores[best])) return -1;
    if (stream.greedy()) return best;
    float temperature = static_cast<float>(stream.temperature), most = -INFINITY;
    float noise[kMaxSparse];
    context_.kernels.gumbel_at(stream.key(), ids, count, noise);
    for (int64_t i = 0; i < count; ++i) {
      float value = scores[ids[i]] / temperature + noise[i];
      if (value > most) {
        most = value;
        best = ids[i];
      }
    }
    return best;
  }

  // Returns the logarithm of the sum of all exponentials; NaN if the best score is not finite.
  double total(const float* scores, int64_t vocab) const {
    if (!std::isfinite(scores[context_.kernels.argmax(scores, vocab)])) return NAN;
    return context_.kernels.log_sum_exp(scores, vocab);
  }

  // Fills `best`, best first, ties by lowest id. Scores with NaN have no order: id 0.
  void rank(const float* scores, int64_t vocab, float* scratch, std::vector<Ranked>& best) const {
    float floor =
        context_.kernels.kth_score(scores, static_cast<int64_t>(best.size()), vocab, scratch);
    size_t over = 0, equal = 0;  // all scores above the floor are among the best
    for (int64_t id = 0; id < vocab && over < best.size(); ++id) {
      if (scores[id] > floor) best[over++] = {scores[id], id};
    }
    for (int64_t id = 0; id < vocab && over + equal < best.size(); ++id) {
      if (scores[id] == floor) best[over + equal++] = {floor, id};
    }
    std::sort(best.begin(), best.begin() + over, [](const Ranked& a, const Ranked& b) {
      return a.score != b.score ? a.score > b.score : a.id < b.id;
    });
  }

  Context& context_;
  std::vector<std::vector<float>> scratch_;  // of each thread
  std::vector<Draw> draws_;                  // of the current call
};

void make_stream(Stream* self, int64_t vocab, double temperature, int64_t top_k, double top_p,
                 double min_p, uint64_t seed, int64_t choice, double repetition, double presence,
                 double frequency, int64_t window, const std::unordered_map<int64_t, double>& bias,
                 std::vector<int64_t> masked, int64_t min_tokens,
                 const std::vector<int64_t>& prompt) {
  require(vocab > 0, "vocab must be positive");
  require(temperature >= 0 && std::isfinite(temperature), "temperature must be finite, 0 or more");
  require(top_p > 0, "top_p must be positive");
  require(min_p >= 0 && min_p <= 1, "min_p must be in [0, 1]");
  require(repetition > 0, "the repetition penalty must be positive");
  require(window >= 0, "penalty_window must be 0 or more");
  new (self) Stream();
  self->vocab = vocab;
  self->temperature = temperature;
  self->filter.top_k = top_k;
  self->filter.top_p = top_p;
  if (min_p > 0) self->filter.log_min_p = static_cast<float>(std::log(min_p));
  self->seed = seed;
  self->choice = choice;
  self->repetition = static_cast<float>(repetition);
  self->presence = static_cast<float>(presence);
  self->frequency = static_cast<float>(frequency);
  self->window = window;
  for (auto [id, value] : bias) {
    self->check(id);
    self->bias.emplace_back(id, static_cast<float>(value));
  }
  for (int64_t id : masked) self->check(id);
  self->masked = std::move(masked);
  self->min_tokens = min_tokens;
  self->see_prompt(prompt);
}

}  // namespace

void bind_sampling(nb::module_& m) {
  nb::class_<Stream>(m, "Stream", "The sampling state of one choice.")
      .def("__init__", &make_stream, nb::arg("vocab"), nb::kw_only(), nb::arg("temperature") = 0.0,
           nb::arg("top_k") = 0, nb::arg("top_p") = 1.0, nb::arg("min_p") = 0.0,
           nb::arg("seed") = 0, nb::arg("choice") = 0, nb::arg("repetition_penalty") = 1.0,
           nb::arg("presence_penalty") = 0.0, nb::arg("frequency_penalty") = 0.0,
           nb::arg("penalty_window") = 0,
           nb::arg("logit_bias") = std::unordered_map<int64_t, double>{},
           nb::arg("masked_ids") = std::vector<int64_t>{}, nb::arg("min_tokens") = 0,
           nb::arg("prompt_ids") = std::vector<int64_t>{},
           "See kernels/sampling_ops.py for the parameters. ValueError for ids outside the vocabulary.");
  nb::class_<NativeSampler>(m, "NativeSampler", "Samples tokens on the threads of a context.")
      .def(nb::init<Context&>(), nb::arg("context"), nb::keep_alive<1, 2>())
      .def("sample", &NativeSampler::sample, nb::arg("logits").noconvert(), nb::arg("rows"),
           nb::arg("streams"), nb::arg("generated"), nb::arg("masks") = nb::none(),
           "The next token of each stream, from row rows[i] of float32 logits [n, vocab] and the\n"
           "ids that it has generated: token ids, -1 where the best score is not finite. A mask,\n"
           "uint32 [(vocab + 31) / 32], has a bit for every token that may be sampled.")
      .def("logprobs", &NativeSampler::logprobs, nb::arg("logits").noconvert(), nb::arg("tokens"),
           nb::arg("count"), nb::arg("also") = std::vector<int64_t>{},
           "Of tokens[r] under row r: (log-probability, ((id, log-probability), ...) of the count\n"
           "best and then of the ids in also).");
  m.def("gumbel_at",
        [](const Context& context, int64_t seed, int64_t choice, int64_t position,
           const Array<const int64_t, 1>& ids, const Array<float, 1>& out) {
          require(ids.shape(0) == out.shape(0), "ids and out differ in length");
          nb::gil_scoped_release release;
          context.kernels.gumbel_at({seed, choice, position}, ids.data(),
                                    static_cast<int64_t>(ids.shape(0)), out.data());
        },
        nb::arg("context"), nb::arg("seed"), nb::arg("choice"), nb::arg("position"),
        nb::arg("ids").noconvert(), nb::arg("out").noconvert(),
        "The noise of some token ids; seed as an int64.");
}
