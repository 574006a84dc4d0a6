static void encode(const Activations&, int64_t, int64_t) {}
