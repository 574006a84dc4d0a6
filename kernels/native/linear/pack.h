// From a tensor as files store it to a packed Matrix.
//
// Block formats are those of GGML (ggml-common.h), and so are their names. No value changes: each
// format has a layout that holds it exactly.
#pragma once
#include <string>
#include <vector>

#include "linear/matrix.h"
#include "threads/pool.h"

namespace pdserve {

// One stored format: a row is a run of blocks.
struct StoredFormat {
  const char* name;
  int64_t block_values;
  int64_t block_bytes;
  Layout layout;
  int group;
  bool wide_scales;
  bool has_minima;
};

// The names of all formats.
std::vector<std::string> stored_formats();

// The format of that name. Throws std::invalid_argument with the names that exist.
const StoredFormat& stored_format(const std::string& name);

// The packed form of `bytes`: rows times cols / block_values blocks. Every byte is read once, tiles
// are packed in parallel. Throws std::invalid_argument if sizes do not fit, std::bad_alloc.
Matrix pack(Pool& pool, const StoredFormat& format, const uint8_t* bytes, int64_t num_bytes,
            int64_t rows, int64_t cols);

}  // namespace pdserve
