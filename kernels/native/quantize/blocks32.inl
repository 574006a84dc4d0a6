// Blocks of 32 values with one scale, and for _1 one minimum, byte for byte like the gguf package.
// Levels are rounded half up, as there; 8-bit levels half away from zero.

inline float largest(const float* x, int count) {  // the first value of the largest magnitude
  float found = 0;
  for (int i = 0; i < count; ++i) {
    if (std::fabs(x[i]) > std::fabs(found)) found = x[i];
  }
  return found;
}

inline float inverse(float d) { return std::fabs(d) > kTiny ? 1 / d : 0; }

// The low nibbles of 16 bytes are the first 16 levels; fifth bits go into a mask of 32 bits.
template <int Bits>
void write_levels(const int (&levels)[32], uint8_t* out) {
  if (Bits == 5) {
    uint32_t mask = 0;
    for (int i = 0; i < 32; ++i) mask |= static_cast<uint32_t>(levels[i] >> 4) << i;
    std::memcpy(out, &mask, 4);
    out += 4;
  }
  for (int i = 0; i < 16; ++i) {
    out[i] = static_cast<uint8_t>((levels[i] & 15) | (levels[i + 16] & 15) << 4);
  }
}

template <int Bits>
void write_0(const float* x, uint8_t* block) {
  constexpr int kMiddle = 1 << (Bits - 1);
  const float d = largest(x, 32) / -kMiddle, id = inverse(d);
  int levels[32];
  for (int i = 0; i < 32; ++i) {
    levels[i] = std::min(2 * kMiddle - 1, static_cast<int>(x[i] * id + (kMiddle + 0.5f)));
  }
  put_half(d, block);
  write_levels<Bits>(levels, block + 2);
}

template <int Bits>
void write_1(const float* x, uint8_t* block) {
  constexpr int kTop = (1 << Bits) - 1;
  const auto [least, most] = std::minmax_element(x, x + 32);
  const float minimum = *least, d = (*most - minimum) / kTop, id = inverse(d);
  int levels[32];
  for (int i = 0; i < 32; ++i) {
    levels[i] = std::min(kTop, static_cast<int>((x[i] - minimum) * id + 0.5f));
  }
  put_half(d, block);
  put_half(minimum, block + 2);
  write_levels<Bits>(levels, block + 4);
}

void write_q8_0(const float* x, uint8_t* block) {
  const float d = std::fabs(largest(x, 32)) / 127, id = inverse(d);
  put_half(d, block);
  for (int i = 0; i < 32; ++i) {
    block[2 + i] = static_cast<uint8_t>(static_cast<int8_t>(std::round(x[i] * id)));
  }
}
