// Every hard bound of Lode: name, unit, reason. Tunable numbers are options (shared/config/fields.h); these are not.
#pragma once

#include <cstdint>

namespace lode {

// Rows of one decode window. Kernels loop over groups of 8 rows (eight int8 activation rows still share one decode of the
// weights in registers); masks are 32 bits wide, so that a later window may hold up to 32 rows without a new layout.
inline constexpr uint32_t kWindowRowsMax = 8;
using RowMask = uint32_t;
static_assert(kWindowRowsMax <= 8 * sizeof(RowMask));

// Sequences with device state at once. Bounds every per-slot table in shared memory.
inline constexpr uint32_t kSequenceSlotsMax = 64;
static_assert(kSequenceSlotsMax >= kWindowRowsMax);

// Cells of one KV block: 256 tokens are 64 index blocks of 4, and a block of one flagship layer is 256 KiB at 8 bits.
inline constexpr uint32_t kKvBlockCells = 256;
// Longest context: 1,048,576 tokens (the flagship's 262,144 times YaRN factor 4).
inline constexpr uint32_t kContextMax = 1u << 20;
inline constexpr uint32_t kKvBlocksPerSequenceMax = kContextMax / kKvBlockCells;

// Model shape bounds; every published relative is far inside. They size arrays, never loops over untrusted counts.
inline constexpr uint32_t kLayersMax = 256;
inline constexpr uint32_t kExpertsMax = 1024;       // ids travel as u16
inline constexpr uint32_t kExpertsUsedMax = 32;     // routed experts per row
inline constexpr uint32_t kVocabMax = 1u << 20;
inline constexpr uint32_t kHiddenMax = 16384;       // embedding width, one stream
inline constexpr uint32_t kExpertWidthMax = 16384;  // expert feed-forward width
static_assert(kExpertsMax <= 65536);

// Distinct (expert) entries of one layer's job: every row may route kExpertsUsedMax different experts.
inline constexpr uint32_t kJobExpertsMax = kWindowRowsMax * kExpertsUsedMax;

// CPU workers: one per NUMA node; today's largest machines show 8 to 16 nodes.
inline constexpr uint32_t kCpuWorkersMax = 16;
inline constexpr uint32_t kDevicesMax = 8;

// Results per row.
inline constexpr uint32_t kLogprobsMax = 20;   // the OpenAI API's own limit
inline constexpr uint32_t kDraftsMax = kWindowRowsMax - 1;

// Rolling histories on the device are addressed by position modulo a ring: 8 rows of a window plus the longest look-back.
inline constexpr uint32_t kConvRing = 16;  // convolution kernel 4: 3 back + 8 rows = 11
inline constexpr uint32_t kPleRing = 32;   // kernel 4, dilation 3: 9 back + 8 rows = 17
static_assert(kConvRing >= 3 + kWindowRowsMax && kPleRing >= 9 + kWindowRowsMax);

}  // namespace lode
