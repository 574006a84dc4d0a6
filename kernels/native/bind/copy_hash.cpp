// The hashing copy of kernels/cuda, built for the host: tests run it as a fake device and compare
// the GPU's results with it.
#include "../../cuda/copy_hash.h"

#include <nanobind/stl/pair.h>

#include "bind.h"

namespace {

using Bytes = Array<uint8_t, 1>;

std::pair<uint64_t, uint64_t> copy_and_hash(const Bytes& pool, uint64_t layer_bytes,
                                            uint64_t block_bytes, uint32_t first_layer,
                                            uint32_t num_layers, const Array<const int32_t, 1>& blocks,
                                            const Bytes& slot, const Array<const uint64_t, 1>& key,
                                            bool to_slot) {
  using namespace copy_hash;
  require(block_bytes > 0 && block_bytes % kUnitBytes == 0, "blocks must be units of 16 bytes");
  require(key.size() == kLanes * sizeof(Lane) / sizeof(u64), "a key has the words of two lanes");
  require(num_layers > 0 && blocks.size() > 0, "there must be a layer and a block");
  uint64_t num_bytes = block_bytes * num_layers * blocks.size();
  require(num_bytes <= slot.size(), "the slot is too small");
  for (size_t i = 0; i < blocks.size(); ++i) {
    require(blocks(i) >= 0 && (first_layer + num_layers - 1) * layer_bytes +
                                      (static_cast<uint64_t>(blocks(i)) + 1) * block_bytes <=
                                  pool.size(),
            "a block outside the pool");
  }
  Pages pages{pool.data(), layer_bytes, block_bytes, first_layer,
              static_cast<u32>(blocks.size()), blocks.data()};
  Lane lanes[kLanes];
  __builtin_memcpy(lanes, key.data(), sizeof lanes);

  nb::gil_scoped_release release;
  u32 num_units = static_cast<u32>(num_bytes / kUnitBytes);
  u64 sums[kLanes] = {};
  for (u32 tile = 0; tile * kTileUnits < num_units; ++tile) {
    u64 of_tile[kLanes] = {};
    for (u32 thread = 0; thread < kThreads; ++thread) {
      u64 shares[kLanes];
      copy_part(pages, slot.data(), num_units, to_slot, tile, thread, lanes, shares);
      for (int lane = 0; lane < kLanes; ++lane) of_tile[lane] = add(of_tile[lane], shares[lane]);
    }
    for (int lane = 0; lane < kLanes; ++lane) {
      sums[lane] = add(sums[lane], tile_share(lanes[lane], of_tile[lane], tile));
    }
  }
  return {finish(lanes[0], sums[0], num_bytes), finish(lanes[1], sums[1], num_bytes)};
}

}  // namespace

void bind_copy_hash(nb::module_& m) {
  m.def("copy_and_hash", &copy_and_hash, array("pool"), nb::arg("layer_bytes"),
        nb::arg("block_bytes"), nb::arg("first_layer"), nb::arg("num_layers"), array("blocks"),
        array("slot"), array("key"), nb::arg("to_slot"),
        "Copies whole blocks of a run of layers into a slot, or out of it, and gives the tag of the\n"
        "copied bytes: one number below 2^61 - 1 a lane. key: kernels/copy_hash.py expand_key.");
}
