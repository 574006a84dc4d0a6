// Copies a payload between the blocks of a KV pool and a slot, and hashes the copied bytes.
//
// The GPU (copy_hash.cu) and the host (native/bind/copy_hash.cpp, for tests) share this source: the
// copy, the walk over blocks and the arithmetic. Only the sum over threads differs.
//
// The hash is the polynomial hash of Carter and Wegman over the field of p = 2^61 - 1, twice, with
// independent keys (r, s): with 32-bit little-endian words w_0 .. w_{n-1} of a payload of B bytes
//
//   tag = s + B r + w_0 r^2 + w_1 r^3 + ... + w_{n-1} r^{n+1}  mod p
//
// Two different payloads differ by a polynomial of degree at most n + 1, which has at most n + 1
// roots: for r uniform in the field they collide with probability at most (n + 1) / p in one lane.
// A slot of 64 MiB has n = 2^24 words: 2^-37 per lane, 2^-74 for both. Key and pads serve only one
// frame (kernels/copy_hash.py), so a tag reveals nothing about the key of another frame.
#pragma once

#if defined(__CUDACC__)
#define COPY_HASH_FN __host__ __device__ __forceinline__
#else
#define COPY_HASH_FN inline
#endif

namespace copy_hash {

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;

constexpr u64 kPrime = (1ull << 61) - 1;
constexpr int kLanes = 2;
constexpr u32 kUnitBytes = 16;       // loaded by a thread at once: 4 words
constexpr u32 kThreads = 256;        // per tile; adjacent threads take adjacent units
constexpr u32 kUnitsPerThread = 16;  // so a tile is 64 KiB
constexpr u32 kTileUnits = kThreads * kUnitsPerThread;

struct Wide {
  u64 hi, lo;
};

COPY_HASH_FN u64 mul_high(u64 a, u64 b) {
#if defined(__CUDA_ARCH__)
  return __umul64hi(a, b);
#else
  return static_cast<u64>((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

COPY_HASH_FN void add_product(Wide& sum, u64 a, u64 b) {
  u64 low = a * b;
  sum.lo += low;
  sum.hi += mul_high(a, b) + (sum.lo < low ? 1 : 0);
}

// The same for a 32-bit word, with half the multiplications.
COPY_HASH_FN void add_product(Wide& sum, u32 a, u64 b) {
  u64 low = static_cast<u64>(a) * static_cast<u32>(b);
  u64 high = static_cast<u64>(a) * static_cast<u32>(b >> 32);
  u64 moved = high << 32;
  sum.lo += low;
  sum.hi += (high >> 32) + (sum.lo < low ? 1 : 0);
  sum.lo += moved;
  sum.hi += sum.lo < moved ? 1 : 0;
}

// x mod p, for x < 2^63.
COPY_HASH_FN u64 fold(u64 x) {
  x = (x & kPrime) + (x >> 61);
  return x >= kPrime ? x - kPrime : x;
}

// x mod p, for x < 2^125: its bits in three parts of 61.
COPY_HASH_FN u64 reduce(const Wide& x) {
  return fold((x.lo & kPrime) + (((x.lo >> 61) | (x.hi << 3)) & kPrime) + (x.hi >> 58));
}

COPY_HASH_FN u64 add(u64 a, u64 b) { return fold(a + b); }

COPY_HASH_FN u64 multiply(u64 a, u64 b) {
  Wide product = {0, 0};
  add_product(product, a, b);
  return reduce(product);
}

COPY_HASH_FN u64 power(u64 base, u32 exponent) {
  u64 result = 1;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1) result = multiply(result, base);
    base = multiply(base, base);
  }
  return result;
}

// One of the two keys with the powers of r that all threads need; built by kernels/copy_hash.py.
struct Lane {
  u64 r, r2, r3, r4;
  u64 row;   // r^(4 kThreads): from a thread's unit to its next
  u64 tile;  // r^(4 kTileUnits)
  u64 pad;   // s
};

// Whole blocks of consecutive layers in a pool. block_bytes is a multiple of kUnitBytes.
struct Pages {
  u8* base;  // block 0 of layer 0
  u64 layer_bytes, block_bytes;
  u32 first_layer, num_blocks;  // num_blocks: of one layer
  const int* blocks;            // [num_blocks]: their numbers in the pool
};

struct alignas(16) Unit {
  u32 words[4];
};

// Loads once, so that the hashed bytes are the stored bytes even if the source changes meanwhile.
COPY_HASH_FN Unit load(const u8* from) {
  Unit unit;
#if defined(__CUDA_ARCH__)
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(unit.words[0]), "=r"(unit.words[1]), "=r"(unit.words[2]), "=r"(unit.words[3])
               : "l"(from)
               : "memory");
#else
  __builtin_memcpy(&unit, from, kUnitBytes);
  asm volatile("" : "+m"(unit));
#endif
  return unit;
}

COPY_HASH_FN void store(u8* to, const Unit& unit) {
#if defined(__CUDA_ARCH__)
  *reinterpret_cast<Unit*>(to) = unit;
#else
  __builtin_memcpy(to, &unit, kUnitBytes);
#endif
}

// A step of Horner's rule: advances the sum by one row of units and adds the unit's polynomial.
COPY_HASH_FN u64 step(const Lane& lane, u64 sum, const Unit& unit) {
  Wide next = {0, unit.words[0]};
  add_product(next, sum, lane.row);
  add_product(next, unit.words[1], lane.r);
  add_product(next, unit.words[2], lane.r2);
  add_product(next, unit.words[3], lane.r3);
  return reduce(next);
}

// The work of one thread of a tile: copies its units and returns its share of each lane's sum.
COPY_HASH_FN void copy_part(const Pages& pages, u8* slot, u32 num_units, bool to_slot, u32 tile,
                            u32 thread, const Lane* lanes, u64* shares) {
  Lane keys[kLanes];  // local copies, so that stores to memory cannot alias them
  for (int lane = 0; lane < kLanes; ++lane) {
    keys[lane] = lanes[lane];
    shares[lane] = 0;
  }
  u32 first = tile * kTileUnits + thread;
  if (first >= num_units) return;
  u32 count = (num_units - first + kThreads - 1) / kThreads;
  if (count > kUnitsPerThread) count = kUnitsPerThread;

  u32 per_block = static_cast<u32>(pages.block_bytes / kUnitBytes);
  u32 unit = first + (count - 1) * kThreads;
  u32 row = unit / per_block, within = unit % per_block;
  u32 layer = row / pages.num_blocks, column = row % pages.num_blocks;
  for (;; unit -= kThreads) {  // from the last to the first, as Horner's rule requires
    u8* page = pages.base + (pages.first_layer + layer) * pages.layer_bytes +
               static_cast<u64>(pages.blocks[column]) * pages.block_bytes +
               static_cast<u64>(within) * kUnitBytes;
    u8* at = slot + static_cast<u64>(unit) * kUnitBytes;
    Unit copied = load(to_slot ? page : at);
    store(to_slot ? at : page, copied);
    for (int lane = 0; lane < kLanes; ++lane) {
      shares[lane] = step(keys[lane], shares[lane], copied);
    }
    if (unit == first) break;
    u32 back = kThreads;
    while (back > within) {  // into the previous block
      back -= within + 1;
      within = per_block - 1;
      if (column) {
        --column;
      } else {
        column = pages.num_blocks - 1;
        --layer;
      }
    }
    within -= back;
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    shares[lane] = multiply(shares[lane], power(keys[lane].r4, thread));
  }
}

// Computes a tile's share of the payload's sum from the sum of its threads' shares.
COPY_HASH_FN u64 tile_share(const Lane& lane, u64 sum, u32 tile) {
  return multiply(sum, power(lane.tile, tile));
}

// Computes the tag from the sum of all tiles' shares.
COPY_HASH_FN u64 finish(const Lane& lane, u64 sum, u64 num_bytes) {
  Wide whole = {0, lane.pad};
  add_product(whole, sum, lane.r2);
  add_product(whole, num_bytes, lane.r);
  return reduce(whole);
}

}  // namespace copy_hash
