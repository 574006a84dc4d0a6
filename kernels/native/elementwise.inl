static void rms_norm(const float*, const float*, const float*, float, int64_t, float*, float*) {}
static void gated(const float*, const float*, Activation, int64_t, float*) {}
static void rope(float*, const float*, const float*, int64_t, int64_t, int64_t) {}
static void add_bias(float*, const float*, int64_t) {}
static void scale(float*, float, int64_t) {}
static void soft_cap(float*, float, int64_t) {}
