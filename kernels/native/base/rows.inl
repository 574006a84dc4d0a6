// Iteration over a row of floats as vectors, the last of which may have fewer than 16 lanes.

// Calls body(column, lanes) for each vector of a row; the last has the remaining lanes.
template <class Body>
PDS_INLINE void each_vector(int64_t cols, const Body& body) {
  int64_t i = 0;
  for (; i + kLanes <= cols; i += kLanes) body(i, kLanes);
  if (i < cols) body(i, cols - i);
}

PDS_INLINE F load_some(const float* p, int64_t n) { return n == kLanes ? load(p) : load_n(p, n); }
PDS_INLINE void store_some(float* p, F a, int64_t n) {
  if (n == kLanes) store(p, a);
  else store_n(p, a, n);
}
