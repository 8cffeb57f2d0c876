// Products whose weights go through shared memory. The rows of a block of threads are copied as
// they lie in memory, 16 bytes at a time, because lanes that read neighbouring blocks of 34 bytes
// touch nine lines of device memory per load; the copies start before the launch ahead has ended,
// because weights never change. Then everything is as in product.h: terms in any order, chains of
// additions in the canonical one. Used by StagedMatKernel (mat_kernels.h) and by NarrowKernel: a
// product with few columns whose input every block quantises for itself, plain or with the mix of
// hyper-connections behind it. For types that can be decoded from shared memory (kStaged). Bound:
// weight bytes over device bandwidth; few columns: latency. Device code.
#pragma once

#include "kernels/cuda/launch.h"
#include "kernels/cuda/product.h"
#include "kernels/cuda/quantize.h"

namespace lode::cuda {

template <class F>
inline constexpr bool kStaged = requires {
  &F::ScaleStaged;
};

inline constexpr uint32_t kCopyBytes = 16;
inline constexpr uint32_t kStagedThreadsMax = 320;

// Rows of a product: `parts` runs of rows that lie one behind the other, part_bytes from run to
// run. A run has room for part_rows rows, of which `valid` exist: row r of run p is p * part_rows +
// r everywhere below. With more than one run, part_rows is a multiple of kGroupRows.
struct DenseTile {
  const uint8_t* w;
  size_t row_bytes, part_bytes;
  uint32_t parts, part_rows, valid;
};

// Shared memory of one run: its bytes with what stands around them in whole copies.
LODE_FN uint32_t PartStageBytes(uint32_t part_rows, size_t row_bytes) {
  return (static_cast<uint32_t>(part_rows * row_bytes) + 2 * kCopyBytes - 1) / kCopyBytes *
         kCopyBytes;
}
LODE_FN uint32_t DenseTermFloats(uint32_t rows, uint32_t n_acts, uint32_t n_blocks) {
  return (rows * n_acts * (n_blocks | 1u) + 3) / 4 * 4;  // what follows stays aligned
}

LODE_DEVICE uint32_t BytesBefore(const uint8_t* p) {
  return static_cast<uint32_t>(reinterpret_cast<uintptr_t>(p)) % kCopyBytes;
}
// Starts the copies of a tile.
LODE_DEVICE void StageTile(const DenseTile& tile, uint8_t* to) {
  const uint32_t stage = PartStageBytes(tile.part_rows, tile.row_bytes);
  for (uint32_t part = 0; part < tile.parts; ++part) {
    const uint8_t* from = tile.w + part * tile.part_bytes;
    const uint32_t before = BytesBefore(from);
    const uint32_t end = before + tile.valid * static_cast<uint32_t>(tile.row_bytes);
    for (uint32_t at = kCopyBytes * ThreadId(); at < end; at += kCopyBytes * ThreadCount())
      CopyAhead16(to + part * stage + at, from - before + at);
  }
}

// As LoadRuns, from a form in shared memory.
template <class F>
LODE_DEVICE ActRuns SharedRuns(const ActForm& form, uint32_t act, uint32_t block, uint32_t k) {
  ActRuns runs;
  const uint8_t* row = form.base + act * form.stride;
  const uint8_t* codes = row + (F::kCrumbs ? form.crumb_offset : 0);
  LODE_UNROLL
  for (uint32_t run = 0; run < 2; ++run) {
    const uint32_t column = block * F::kBlock + F::Column(k, run);
    const Word4 w = *reinterpret_cast<const Word4*>(codes + column);
    runs.y[4 * run] = w.x, runs.y[4 * run + 1] = w.y;
    runs.y[4 * run + 2] = w.z, runs.y[4 * run + 3] = w.w;
    if constexpr (F::kOffset != 0 || F::kMins != decode::kNoMins)
      runs.sum[run] = reinterpret_cast<const int16_t*>(row + form.sum_offset)[column / 16];
  }
  runs.d = reinterpret_cast<const float*>(row + form.d_offset)[block];
  return runs;
}

// Terms of all units of the tile, from staged rows; terms[(row * n_acts + act) * stride + block]
// with stride = blocks | 1. kSharedForm: the form lies in shared memory, row a is acts[a]'s place.
template <class F, bool kSharedForm>
LODE_DEVICE void DenseTerms(const DenseTile& tile, const uint8_t* staged, const ActForm& form,
                            const uint32_t* acts, uint32_t n_acts, uint32_t columns, float* terms) {
  using namespace canonical;
  static_assert(kStaged<F> && !F::kRunScales && F::kMins == decode::kNoMins);
  const uint32_t n_chunks = columns / 32, stride = n_chunks / F::kChunks | 1u;
  const uint32_t row_bytes = static_cast<uint32_t>(tile.row_bytes);
  const uint32_t n_rows = tile.parts * tile.part_rows;
  const uint32_t units = (n_rows + kGroupRows - 1) / kGroupRows * n_chunks;
  const auto load = [&](uint32_t a, uint32_t block, uint32_t k) {
    if constexpr (kSharedForm) return SharedRuns<F>(form, a, block, k);
    return LoadRuns<F>(form, acts[a], block, k);
  };
  for (uint32_t base = ThreadId() / 32 * 32; base < units; base += ThreadCount()) {
    const uint32_t mine = base + ThreadId() % 32;
    const bool active = mine < units;
    const uint32_t group = active ? mine / n_chunks : 0;
    const uint32_t chunk = active ? mine - group * n_chunks : mine % F::kChunks;
    const uint32_t block = chunk / F::kChunks, k = chunk % F::kChunks;
    // A trip to the L2 takes longer than a row's arithmetic: several rows are on their way at once.
    constexpr uint32_t kAhead = kSharedForm ? 1 : 4;
    ActRuns runs[kAhead];
    const auto load_from = [&](uint32_t a) {
      LODE_UNROLL
      for (uint32_t j = 0; j < kAhead; ++j) {
        if (a + j < n_acts) runs[j] = load(a + j, block, k);
      }
    };
    load_from(0);
    const uint32_t part = tile.parts == 1 ? 0 : group * kGroupRows / tile.part_rows;
    const uint32_t first = group * kGroupRows - part * tile.part_rows;
    const uint8_t* at = staged + part * PartStageBytes(tile.part_rows, tile.row_bytes) +
                        BytesBefore(tile.w + part * tile.part_bytes) + block * F::kBytes;
    const auto row_at = [&](uint32_t r) {  // rows that do not exist repeat the last
      return at + (first + r < tile.valid ? first + r : tile.valid - 1) * row_bytes;
    };
    DecodedRows<F> rows;
    LODE_UNROLL
    for (uint32_t r = 0; r < kGroupRows; ++r) F::DecodeStaged(row_at(r), k, rows.code[r]);
    LODE_UNROLL
    for (uint32_t i = 0; i < kLaneTerms<F>; ++i)
      rows.d[i] = F::ScaleStaged(row_at(TermRow<F>(k, i)));
    const auto multiply = [&](uint32_t a, const ActRuns& with) {
      int32_t isum[kGroupRows];
      LODE_UNROLL
      for (uint32_t r = 0; r < kGroupRows; ++r)
        isum[r] = ChunkSum<F>(rows.code[r], rows.scale[r], with);
      ReduceRows<F::kChunks>(isum, k);
      LODE_UNROLL
      for (uint32_t i = 0; i < kLaneTerms<F>; ++i) {
        const uint32_t row = group * kGroupRows + TermRow<F>(k, i);
        if (active && k < kGroupRows && row < n_rows)
          terms[(row * n_acts + a) * stride + block] =
              Mul(static_cast<float>(isum[i]), Mul(rows.d[i], with.d));
      }
    };
    LODE_NO_UNROLL
    for (uint32_t a = 0; a < n_acts; a += kAhead) {
      LODE_UNROLL
      for (uint32_t j = 0; j < kAhead; ++j) {
        if (a + j < n_acts) multiply(a + j, runs[j]);
      }
      load_from(a + kAhead);
    }
  }
}

// sink(row, act, value) once for each; behind a barrier after DenseTerms.
template <class F, class Sink>
LODE_DEVICE void DenseChains(uint32_t n_rows, uint32_t n_acts, uint32_t columns, const float* terms,
                             const Sink& sink) {
  const uint32_t blocks = columns / F::kBlock, stride = blocks | 1u;
  for (uint32_t i = ThreadId(); i < n_rows * n_acts; i += ThreadCount())
    sink(i / n_acts, i % n_acts, AddTerms(0.0f, terms + i * stride, blocks));
}

// ---- few columns
// What a block needs of shared memory, in the order in which it lies there.
struct NarrowLayout {
  uint32_t parts, part_rows, rows;
  uint32_t terms, form, form_stride, d_offset, sum_offset, mixed, bytes;
};
template <class F>
LODE_FN NarrowLayout LayOutNarrow(const NarrowProduct& p) {
  NarrowLayout l;
  l.parts = p.streams != 0 ? p.streams : 1;
  l.part_rows = kNarrowRows;
  l.rows = l.parts * l.part_rows;
  const uint32_t staged = l.parts * PartStageBytes(l.part_rows, p.row_bytes);
  l.terms = staged;
  l.form = l.terms + static_cast<uint32_t>(sizeof(float)) *
                         DenseTermFloats(l.rows, p.n_rows, p.columns / F::kBlock);
  l.d_offset = p.columns;  // codes first: a multiple of 32
  l.sum_offset = l.d_offset + p.columns / F::kBlock * static_cast<uint32_t>(sizeof(float));
  l.form_stride = (l.sum_offset + p.columns / 16 * 2 + kCopyBytes - 1) / kCopyBytes * kCopyBytes;
  l.mixed = l.form + p.n_rows * l.form_stride;
  l.bytes = l.mixed +
            (p.streams != 0 ? p.n_rows * l.part_rows * static_cast<uint32_t>(sizeof(float)) : 0);
  return l;
}

// What a block of a narrow product works on: its rows, whose copies this starts, and where the
// form of its input will lie in shared memory. Layout: NarrowLayout or TensorNarrowLayout.
struct NarrowBlock {
  uint32_t first;  // row of every stream
  DenseTile tile;
  ActForm form;
};
template <class Layout>
LODE_DEVICE NarrowBlock BeginNarrow(const NarrowProduct& p, const Layout& l, uint8_t* shared) {
  NarrowBlock b;
  b.first = BlockX() * kNarrowRows;
  const uint32_t left = p.rows - b.first;
  b.tile = {.w = p.w + b.first * p.row_bytes,
            .row_bytes = p.row_bytes,
            .part_bytes = p.rows * p.row_bytes,
            .parts = l.parts,
            .part_rows = kNarrowRows,
            .valid = left < kNarrowRows ? left : kNarrowRows};
  StageTile(b.tile, shared);
  b.form = {.base = shared + l.form,
            .stride = l.form_stride,
            .d_offset = l.d_offset,
            .sum_offset = l.sum_offset,
            .crumb_offset = 0};
  return b;
}

// The gates that ride along, by the last threads of the first block.
LODE_DEVICE void NarrowGates(const NarrowProduct& p) {
  const uint32_t i = ThreadCount() - 1 - ThreadId();
  if (BlockX() == 0 && p.gates != nullptr && i < p.n_rows)
    p.gates[i] = canonical::Sigmoid(p.gates[i]);
}

// The input of all rows to shared memory, 8 columns per lane; rows follow each other in whole
// blocks, so a block of 32 is four neighbouring lanes of one warp.
// x: p.x, or what silu has made of it. inverse: silu is still to be done, with this factor.
LODE_DEVICE void QuantizeNarrow(const NarrowProduct& p, const float* from, const ActForm& form,
                                float inverse) {
  using namespace canonical;
  const uint32_t per_row = p.columns / kLaneColumns, all = p.n_rows * per_row;
  for (uint32_t base = ThreadId() / 32 * 32; base < all; base += ThreadCount()) {
    const uint32_t mine = base + ThreadId() % 32, row = mine / per_row;
    const LanePlace at = {row, (mine - row * per_row) * kLaneColumns, mine < all};
    Eight x = LoadEight(from + static_cast<size_t>(row) * p.columns + at.column,
                        at.inside ? kLaneColumns : 0, true);
    if (p.streams != 0 && from == p.x && at.inside) {
      LODE_UNROLL
      for (uint32_t i = 0; i < kLaneColumns; ++i) x.v[i] = Silu(Mul(x.v[i], inverse));
    }
    const uint32_t of32 = LargestOf32(x.v);
    StoreForm(form, 32, at, x.v, of32);
    if (of32 >= kInfinityBits && BlockX() == 0) ReportNotFinite(p.check, row);
  }
}

inline constexpr uint32_t kMixStreams =
    4;  // whose chains and sigmoids one thread has going at once

// Normed values of kMixStreams streams from s on, for item i of the mix: (row, column of the
// block).
LODE_DEVICE void LoadNormed(const NarrowProduct& p, uint32_t i, uint32_t first, uint32_t s,
                            float (&normed)[kMixStreams]) {
  const float* at = p.normed + static_cast<size_t>(i / kNarrowRows) * p.streams * p.rows + first +
                    i % kNarrowRows;
  LODE_UNROLL
  for (uint32_t k = 0; k < kMixStreams; ++k)
    normed[k] = i < p.n_rows * kNarrowRows && s + k < p.streams
                    ? at[static_cast<size_t>(s + k) * p.rows]
                    : 0.0f;
}

// The form of the block's columns of the mix, mixed[row][kNarrowRows]: behind a barrier. Four lanes
// per row: eight rows are one warp.
LODE_DEVICE void FinishMix(const NarrowProduct& p, const float* mixed, uint32_t first) {
  if (ThreadId() >= 32) return;
  const uint32_t act = ThreadId() / 4, column = ThreadId() % 4 * kLaneColumns;
  const LanePlace at = {act, first + column, act < p.n_rows};
  float v[kLaneColumns];
  LODE_UNROLL
  for (uint32_t i = 0; i < kLaneColumns; ++i)
    v[i] = at.inside ? mixed[act * kNarrowRows + column + i] : 0.0f;
  const uint32_t of32 = LargestOf32(v);
  if (p.form.base != nullptr) StoreForm(p.form, 32, at, v, of32);
  if (of32 >= kInfinityBits) ReportNotFinite(p.y_check, act);
}

// Columns first..first + kNarrowRows of the mix, from the terms of all streams; then their form.
// normed: of this thread's first item.
template <class F>
LODE_DEVICE void MixColumns(const NarrowProduct& p, const float* terms, uint32_t first,
                            float inverse, float (&normed)[kMixStreams], float* mixed) {
  using namespace canonical;
  const uint32_t blocks = p.columns / F::kBlock, stride = blocks | 1u;
  for (uint32_t i = ThreadId(); i < p.n_rows * kNarrowRows; i += ThreadCount()) {
    const uint32_t act = i / kNarrowRows, c = i % kNarrowRows;
    float x = 0;
    for (uint32_t s = 0; s < p.streams; s += kMixStreams) {
      if (s != 0 || i != ThreadId()) LoadNormed(p, i, first, s, normed);
      float gated[kMixStreams];
      LODE_UNROLL
      for (uint32_t k = 0; k < kMixStreams; ++k) {
        const uint32_t of = s + k < p.streams ? s + k : s;  // a repeated one is not added
        const float* chain = terms + ((of * kNarrowRows + c) * p.n_rows + act) * stride;
        gated[k] = Mul(Sigmoid(AddTerms(0.0f, chain, blocks)), normed[k]);
      }
      LODE_UNROLL
      for (uint32_t k = 0; k < kMixStreams; ++k) {
        if (s + k < p.streams) x = s + k == 0 ? gated[k] : Add(x, gated[k]);
      }
    }
    mixed[i] = Mul(x, inverse);
    p.y[static_cast<size_t>(act) * p.rows + first + c] = mixed[i];
  }
  SyncBlock();
  FinishMix(p, mixed, first);
}
static_assert(kNarrowRows == 4 * kLaneColumns && kWindowRowsMax <= 8);

template <class F>
LODE_KERNEL(kProductThreadsMax)
NarrowKernel(NarrowProduct p) {
  static_assert(F::kBlock == 32 && !F::kCrumbs);
  LetNextStart();
  const NarrowLayout l = LayOutNarrow<F>(p);
  uint8_t* shared = DynamicShared();
  const NarrowBlock b = BeginNarrow(p, l, shared);
  const uint32_t first = b.first;
  float* terms = reinterpret_cast<float*>(shared + l.terms);
  const float inverse = p.streams != 0 ? canonical::Div(1.0f, static_cast<float>(p.streams)) : 1.0f;
  WaitForPrevious();
  NarrowGates(p);
  float normed[kMixStreams];
  if (p.streams != 0) LoadNormed(p, ThreadId(), first, 0, normed);
  QuantizeNarrow(p, p.x, b.form, inverse);
  WaitForCopies();
  SyncBlock();
  DenseTerms<F, true>(b.tile, shared, b.form, nullptr, p.n_rows, p.columns, terms);
  SyncBlock();
  if (p.streams != 0) {
    MixColumns<F>(p, terms, first, inverse, normed, reinterpret_cast<float*>(shared + l.mixed));
    return;
  }
  DenseChains<F>(b.tile.valid, p.n_rows, p.columns, terms,
                 [&](uint32_t row, uint32_t act, float value) {
                   p.y[static_cast<size_t>(act) * p.rows + first + row] = value;
                 });
}

template <class F>
bool LaunchStagedNarrow(CUstream_st* stream, const NarrowProduct& product) {
  const uint32_t bytes = LayOutNarrow<F>(product).bytes;
  if (bytes > shared_bytes_max || product.columns % F::kBlock != 0) return false;
  if (product.streams != 0 && product.rows % kNarrowRows != 0) return false;
  const uint32_t parts = product.streams != 0 ? product.streams : 1;
  const uint32_t units = parts * kNarrowRows / kGroupRows * (product.columns / 32);
  const uint32_t lanes = product.n_rows * product.columns / kLaneColumns;
  uint32_t threads = units > lanes ? units : lanes;
  threads = threads > kNarrowThreadsMax ? kNarrowThreadsMax : (threads + 31) / 32 * 32;
  const uint32_t blocks = (product.rows + kNarrowRows - 1) / kNarrowRows;
  LaunchAhead(stream, {blocks}, threads, bytes, &NarrowKernel<F>, product);
  return true;
}

// By tensor cores (tensor_narrow.h): Q8_0.
template <class F>
bool LaunchTensorNarrow(CUstream_st* stream, const NarrowProduct& product);

template <class F>
bool LaunchNarrow([[maybe_unused]] CUstream_st* stream,
                  [[maybe_unused]] const NarrowProduct& product) {
  if constexpr (kStaged<F>) {
    if (LaunchTensorNarrow<F>(stream, product)) return true;
    return LaunchStagedNarrow<F>(stream, product);
  } else {
    return false;
  }
}

}  // namespace lode::cuda
