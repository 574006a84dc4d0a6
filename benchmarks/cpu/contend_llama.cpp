// Runs llama.cpp on demand: the warm process of the harness for this peer.
//
// usage: contend_llama MODEL THREADS [CONTEXT]
// One request a line on standard input, one JSON object a line on standard output:
//   run BATCH PROMPT NEW NUMBER   prefill, then a batched decode loop without sampling, as
//                                 llama-batched-bench does it: {"prefill_s": , "decode_s": }
//   score ID ID ...               teacher-forced, at every position but the last: {"argmax": [],
//                                 "nll": []}, the latter of the next id
// Why not llama-batched-bench: it loads the model for every run, so that runs of two contenders
// cannot follow each other closely. Figures of both agree.

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "llama.h"

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

// A context for `sequences` of `length` tokens each, with the library's defaults for all else.
class Context {
 public:
  Context(llama_model* model, int sequences, int length, int threads) {
    llama_context_params params = llama_context_default_params();
    const int per_sequence = (length + 255) / 256 * 256;
    params.n_ctx = sequences * per_sequence;
    params.n_batch = 2048;
    params.n_ubatch = 512;
    params.n_seq_max = sequences;
    params.n_threads = params.n_threads_batch = threads;
    params.no_perf = true;
    params.kv_unified = false;
    context_ = llama_init_from_model(model, params);
    if (!context_) throw std::runtime_error("no context");
    batch_ = llama_batch_init(sequences * per_sequence, 0, 1);
  }
  ~Context() {
    llama_batch_free(batch_);
    llama_free(context_);
  }
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  llama_context* get() { return context_; }
  void forget() {
    llama_memory_clear(llama_get_memory(context_), false);
    clear();
  }
  void clear() { batch_.n_tokens = 0; }
  void add(llama_token id, int position, int sequence, bool output) {
    const int at = batch_.n_tokens++;
    batch_.token[at] = id;
    batch_.pos[at] = position;
    batch_.n_seq_id[at] = 1;
    batch_.seq_id[at][0] = sequence;
    batch_.logits[at] = output;
  }
  void decode() {
    const int most = static_cast<int>(llama_n_batch(context_));
    for (int at = 0; at < batch_.n_tokens; at += most) {
      const int count = std::min(most, batch_.n_tokens - at);
      const llama_batch part{count,           batch_.token + at,  nullptr, batch_.pos + at,
                             batch_.n_seq_id + at, batch_.seq_id + at, batch_.logits + at};
      if (llama_decode(context_, part) != 0) throw std::runtime_error("llama_decode failed");
    }
    llama_synchronize(context_);
  }

 private:
  llama_context* context_ = nullptr;
  llama_batch batch_{};
};

class Contender {
 public:
  Contender(const char* path, int threads) : threads_(threads) {
    llama_model_params params = llama_model_default_params();
    model_ = llama_model_load_from_file(path, params);
    if (!model_) throw std::runtime_error(std::string("cannot load ") + path);
    vocab_ = llama_vocab_n_tokens(llama_model_get_vocab(model_));
  }
  ~Contender() {
    context_.reset();
    llama_model_free(model_);
  }

  void run(int batch, int prompt, int made, unsigned number) {
    Context& context = sized(batch, prompt + made);
    context.forget();
    unsigned state = 2654435761u * (number + 1);
    const auto some_id = [&] {
      state = state * 1664525u + 1013904223u;
      return static_cast<llama_token>((state >> 8) % static_cast<unsigned>(vocab_));
    };
    for (int s = 0; s < batch; ++s)
      for (int i = 0; i < prompt; ++i) context.add(some_id(), i, s, i == prompt - 1);
    const auto started = Clock::now();
    context.decode();
    const double prefill = seconds_since(started);
    const auto first = Clock::now();
    for (int i = 0; i + 1 < made; ++i) {  // the prefill has made the first of them
      context.clear();
      for (int s = 0; s < batch; ++s) context.add(some_id(), prompt + i, s, true);
      context.decode();
    }
    std::printf("{\"prefill_s\": %.6f, \"decode_s\": %.6f}\n", prefill, seconds_since(first));
  }

  void score(const std::vector<llama_token>& ids) {
    constexpr int kPart = 512;  // logits of a part at a time
    const int count = static_cast<int>(ids.size());
    Context& context = sized(1, count);
    context.forget();
    std::ostringstream best, nll;
    nll.precision(9);
    for (int from = 0; from < count; from += kPart) {
      const int part = std::min(kPart, count - from);
      context.clear();
      for (int i = 0; i < part; ++i) context.add(ids[from + i], from + i, 0, true);
      context.decode();
      for (int i = 0; i < part; ++i) {
        const float* logits = llama_get_logits_ith(context.get(), i);
        const auto top = std::max_element(logits, logits + vocab_);
        if (from + i + 1 == count) break;
        best << (from + i ? ", " : "") << top - logits;
        double sum = 0;
        for (int v = 0; v < vocab_; ++v) sum += std::exp(double(logits[v]) - double(*top));
        nll << (from + i ? ", " : "")
            << std::log(sum) + double(*top) - double(logits[ids[from + i + 1]]);
      }
    }
    std::printf("{\"argmax\": [%s], \"nll\": [%s]}\n", best.str().c_str(), nll.str().c_str());
  }

 private:
  Context& sized(int sequences, int length) {
    if (sequences != sequences_ || length != length_) {
      context_.reset();
      context_ = std::make_unique<Context>(model_, sequences, length, threads_);
      sequences_ = sequences;
      length_ = length;
    }
    return *context_;
  }

  llama_model* model_ = nullptr;
  int threads_, vocab_ = 0, sequences_ = 0, length_ = 0;
  std::unique_ptr<Context> context_;
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: contend_llama MODEL THREADS\n");
    return 2;
  }
  llama_backend_init();
  const auto started = Clock::now();
  try {
    Contender contender(argv[1], std::atoi(argv[2]));
    std::printf("{\"ready_s\": %.3f}\n", seconds_since(started));
    std::fflush(stdout);
    for (std::string line; std::getline(std::cin, line);) {
      std::istringstream words(line);
      std::string verb;
      words >> verb;
      if (verb == "run") {
        int batch = 0, prompt = 0, made = 0;
        unsigned number = 0;
        words >> batch >> prompt >> made >> number;
        if (!words || batch < 1 || prompt < 1 || made < 1) throw std::runtime_error("bad run");
        contender.run(batch, prompt, made, number);
      } else if (verb == "score") {
        std::vector<llama_token> ids;
        for (llama_token id; words >> id;) ids.push_back(id);
        if (ids.size() < 2) throw std::runtime_error("bad score");
        contender.score(ids);
      } else {
        throw std::runtime_error("unknown request");
      }
      std::fflush(stdout);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "contend_llama: %s\n", error.what());
    return 1;
  }
  return 0;
}
