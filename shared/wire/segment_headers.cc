// See segment_headers.h. Magic last: a header that is half written has none.
#include "shared/wire/segment_headers.h"

#include <atomic>
#include <cstring>

#include "kernels/canonical.h"
#include "shared/base/check.h"
#include "shared/wire/layout_hash.h"

namespace lode {
namespace {

// The magic is a plain field that the fd's journey orders (sendmsg after Init, recvmsg before
// Check); the fence keeps the compiler from storing it before the rest.
void StoreMagic(uint64_t* field, uint64_t magic) {
  std::atomic_ref<uint64_t>(*field).store(magic, std::memory_order_release);
}

Status CheckCommon(const Segment& segment, size_t bytes, uint64_t magic, uint64_t magic_wanted,
                   uint64_t hash, uint64_t hash_wanted) {
  const std::string& label = segment.label();
  if (segment.size() < bytes) {
    return InvalidArgument("segment '{}' has {} bytes, its layout needs {}", label, segment.size(),
                           bytes);
  }
  if (magic != magic_wanted)
    return InvalidArgument("segment '{}' has no valid header (magic {:#x})", label, magic);
  if (hash != hash_wanted) {
    return FailedPrecondition(
        "segment '{}' was laid out by another build (hash {:#x}, this build {:#x}); start all "
        "processes from one installation",
        label, hash, hash_wanted);
  }
  return OkStatus();
}

}  // namespace

void InitExchange(const Segment& segment, const ExchangeShape& shape, uint32_t device) {
  LODE_CHECK(segment.size() >= ExchangeLayout{shape}.bytes(), "exchange segment too small");
  auto* header = segment.As<ExchangeHeader>();
  header->layout_hash = kExchangeLayoutHash;
  header->shape = shape;
  header->device = device;
  StoreMagic(&header->magic, kExchangeMagic);
}

Status CheckExchange(const Segment& segment, const ExchangeShape& shape) {
  if (segment.size() < sizeof(ExchangeHeader)) {
    return InvalidArgument("segment '{}' is too small for an exchange header", segment.label());
  }
  const auto* header = segment.As<const ExchangeHeader>();
  LODE_RETURN_IF_ERROR(CheckCommon(segment, ExchangeLayout{shape}.bytes(), header->magic,
                                   kExchangeMagic, header->layout_hash, kExchangeLayoutHash));
  const ExchangeShape seen = header->shape;
  if (!(seen == shape)) {
    return FailedPrecondition(
        "the exchange is made for hidden {}, expert width {}, {} experts used, {} workers; this "
        "process needs {}, {}, {}, {}",
        seen.hidden, seen.expert_width, seen.experts_used, seen.n_workers, shape.hidden,
        shape.expert_width, shape.experts_used, shape.n_workers);
  }
  return OkStatus();
}

void InitWindowSegment(const Segment& segment, uint32_t generation, uint32_t device,
                       uint32_t vocab) {
  LODE_CHECK(segment.size() >= sizeof(WindowSegment), "window segment too small");
  auto* window = segment.As<WindowSegment>();
  window->layout_hash = kWindowLayoutHash;
  window->generation = generation;
  window->device = device;
  window->vocab = vocab;
  StoreMagic(&window->magic, kWindowMagic);
}

Status CheckWindowSegment(const Segment& segment, uint32_t generation, uint32_t device,
                          uint32_t vocab) {
  if (segment.size() < sizeof(WindowSegment)) {
    return InvalidArgument("segment '{}' is too small for a window segment", segment.label());
  }
  const auto* window = segment.As<const WindowSegment>();
  LODE_RETURN_IF_ERROR(CheckCommon(segment, sizeof(WindowSegment), window->magic, kWindowMagic,
                                   window->layout_hash, kWindowLayoutHash));
  if (window->generation != generation || window->device != device || window->vocab != vocab) {
    return FailedPrecondition(
        "the window segment is of generation {}, device {}, vocabulary {}; this worker is of {}, "
        "{}, {}",
        window->generation, window->device, window->vocab, generation, device, vocab);
  }
  return OkStatus();
}

void InitArena(const Segment& segment, const ArenaLayout& layout, const std::string& identity) {
  LODE_CHECK(segment.size() >= layout.bytes, "arena too small");
  auto* header = segment.As<ArenaHeader>();
  LODE_CHECK(identity.size() < sizeof(header->identity), "identity '{}' too long", identity);
  StoreMagic(&header->magic, 0);  // void until everything below is written
  header->experts_complete.store(0, std::memory_order_relaxed);  // the magic's release publishes it
  const size_t n = layout.layers.size() * layout.experts;
  ArenaExpert* experts = ArenaExperts(header);
  for (size_t i = 0; i < n; ++i) {
    experts[i].complete.store(0, std::memory_order_relaxed);  // likewise
    experts[i].hash = 0;
  }
  std::memset(header->identity, 0, sizeof(header->identity));
  std::memcpy(header->identity, identity.data(), identity.size());
  header->layout_hash = kArenaLayoutHash;
  header->arithmetic_version = kArithmeticVersion;
  header->node = layout.node;
  header->n_nodes = layout.n_nodes;
  header->layers = static_cast<uint32_t>(layout.layers.size());
  header->experts = layout.experts;
  header->bytes = layout.bytes;
  StoreMagic(&header->magic, kArenaMagic);
}

Status CheckArena(const Segment& segment, const ArenaLayout& layout, const std::string& identity) {
  if (segment.size() < sizeof(ArenaHeader)) {
    return InvalidArgument("segment '{}' is too small for an arena header", segment.label());
  }
  const auto* header = segment.As<const ArenaHeader>();
  LODE_RETURN_IF_ERROR(CheckCommon(segment, layout.bytes, header->magic, kArenaMagic,
                                   header->layout_hash, kArenaLayoutHash));
  char seen[sizeof(header->identity)];
  std::memcpy(seen, header->identity, sizeof(seen));
  seen[sizeof(seen) - 1] = '\0';
  if (identity != seen)
    return FailedPrecondition("the arena holds model {}, this process serves {}", seen, identity);
  if (header->arithmetic_version != kArithmeticVersion) {
    return FailedPrecondition("the arena was filled by arithmetic version {}, this build has {}",
                              header->arithmetic_version, kArithmeticVersion);
  }
  if (header->node != layout.node || header->n_nodes != layout.n_nodes ||
      header->layers != layout.layers.size() || header->experts != layout.experts ||
      header->bytes != layout.bytes) {
    return FailedPrecondition(
        "the arena is node {} of {} with {} layers of {} experts in {} bytes; expected node {} of "
        "{}, {}, {}, {}",
        header->node, header->n_nodes, header->layers, header->experts, header->bytes, layout.node,
        layout.n_nodes, layout.layers.size(), layout.experts, layout.bytes);
  }
  return OkStatus();
}

}  // namespace lode
