static void store_kv(const KvLayer&, int64_t, const float*, const float*) {}
static void attend(const Attend&, float*) {}
static int64_t attend_scratch(const Attend&) { return 0; }
static void attend_tiles(const Attend&, int64_t, int64_t, float*, float*) {}
static void attend_merge(const Attend&, const float*, float*) {}
