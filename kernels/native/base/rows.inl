// A row of floats taken as vectors, the last of which may have fewer than 16 lanes.

// The vectors of a row, the last of them with the lanes that are left: body(column, lanes).
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
