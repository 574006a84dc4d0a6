// The register tile of a product: rows times tiles of 16 outputs.
//
// An output has one float accumulator, to which its blocks of inputs are added in order. Other
// rows, other tiles and the division into panels never change that order.

// Outputs of one register tile.
struct Target {
  float* y;
  int64_t stride;
  int64_t outputs;  // number of outputs from y on; the last tile may be partial
  bool resume;      // y holds the sums of the previous blocks
};

template <int kRows, int kTiles>
PDS_INLINE void load_sums(const Target& to, F (&acc)[kRows][kTiles]) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; ++t) {
      if (!to.resume) {
        acc[r][t] = zero();
      } else {
        int64_t left = to.outputs - 16 * t;
        acc[r][t] = load_n(to.y + r * to.stride + 16 * t, left < 16 ? left : 16);
      }
    }
  }
}

template <int kRows, int kTiles>
PDS_INLINE void store_sums(const Target& to, const F (&acc)[kRows][kTiles]) {
  const bool whole = to.outputs >= 16 * kTiles;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 8
    for (int t = 0; t < kTiles; ++t) {
      float* y = to.y + r * to.stride + 16 * t;
      int64_t left = to.outputs - 16 * t;
      if (whole || left >= 16) {
        store(y, acc[r][t]);
      } else {
        store_n(y, acc[r][t], left);
      }
    }
  }
}
