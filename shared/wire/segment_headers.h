// Filling and checking the headers of segments. The process that creates a segment calls Init
// before it passes the fd on; every process that attaches one calls Check before it looks at
// anything else. All checks are against what the caller computed itself from the model, so a
// segment of another model, build, device or generation is refused with a sentence.
#pragma once

#include <string>

#include "shared/base/status.h"
#include "shared/shm/segment.h"
#include "shared/wire/arena_layout.h"
#include "shared/wire/exchange_layout.h"
#include "shared/wire/window_segment.h"

namespace lode {

// Exchange. The segment holds ExchangeLayout{shape}.bytes() zero bytes; the daemon creates it (a
// new one for every GPU worker generation is not needed: tags carry the generation).
void InitExchange(const Segment& segment, const ExchangeShape& shape, uint32_t device);
Status CheckExchange(const Segment& segment, const ExchangeShape& shape);

// Window segment. Fresh (zero) memory of sizeof(WindowSegment); the daemon creates one per GPU
// worker generation.
void InitWindowSegment(const Segment& segment, uint32_t generation, uint32_t device,
                       uint32_t vocab);
Status CheckWindowSegment(const Segment& segment, uint32_t generation, uint32_t device,
                          uint32_t vocab);

// Arena. Init is the CPU worker's (cpu_worker/weight_store.cc); peers and the GPU worker only
// check. Whether an expert is complete is a question to ArenaExperts(header)[layer * experts +
// expert].complete.
void InitArena(const Segment& segment, const ArenaLayout& layout, const std::string& identity);
Status CheckArena(const Segment& segment, const ArenaLayout& layout, const std::string& identity);
inline ArenaExpert* ArenaExperts(ArenaHeader* header) {
  return reinterpret_cast<ArenaExpert*>(header + 1);
}
inline const ArenaExpert* ArenaExperts(const ArenaHeader* header) {
  return reinterpret_cast<const ArenaExpert*>(header + 1);
}

}  // namespace lode
