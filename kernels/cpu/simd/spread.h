// Byte shuffles inside 32-bit lanes, shared by the parts of simd/x86.h. Included after a register
// header (reg256.h or reg512.h) by one ISA translation unit.
#pragma once

#include <cstdint>

namespace lode {
namespace {

// Byte k of every lane = byte index[k] of that lane; 0x80 gives zero.
inline Reg::I SpreadBytes(Reg::I w, uint32_t index) {
  const auto lane = [index](uint32_t l) {
    uint32_t moved = 0;
    for (uint32_t k = 0; k < 32; k += 8) {
      const uint32_t byte = (index >> k) & 255;
      moved |= (byte & 0x80 ? byte : byte + 4 * l) << k;
    }
    return moved;
  };
  const uint32_t lanes[4] = {lane(0), lane(1), lane(2), lane(3)};
  return Reg::Shuffle8(w, Reg::Broadcast128(lanes));
}

}  // namespace
}  // namespace lode
