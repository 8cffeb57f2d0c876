// What host code may start on a cuda stream: plain argument blocks and one function per kernel.
// Every function only enqueues. Rows are the window's; row r of a buffer lies at r * stride floats.
// Callers: gpu_worker/cuda_device*.cc and tests. Formulas and orders: docs/design/arithmetic.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "gpu_worker/expert_plan.h"
#include "kernels/cuda/experts.h"
#include "kernels/cuda/forms.h"
#include "kernels/cuda/window.h"
#include "kernels/formats.h"
#include "kernels/ops.h"

struct CUstream_st;

namespace lode::cuda {

// What one block of threads may have of shared memory; set by OpenCard. No bit depends on it.
extern uint32_t shared_bytes_max;
extern uint32_t multiprocessors;  // of the card; likewise
extern bool tensor_products;      // the card has integer tensor cores for tensor_mat.h; likewise

// Whom kernels blame for a value that is not finite.
struct CheckArgs {
  WindowBlock* window = nullptr;
  uint32_t layer = 0;
  LayerPart part = LayerPart::kMixer;
  bool logits_only = false;
};

// ---- products
// How a product is cut: any valid shape gives the same bits. ChooseShape knows which is fast.
struct ProductShape {
  uint32_t tile_rows = 0;  // weight rows of one block of threads, <= 16
  uint32_t threads = 0;    // a multiple of 32, <= 256, >= tile_rows * activation rows
};
// rows: of all matrices of the launch together.
ProductShape ChooseShape(Format format, uint32_t rows, uint32_t columns, uint32_t n_acts,
                         uint32_t multiprocessors);
bool ShapeIsValid(const ProductShape& shape, uint32_t n_acts);

struct MatTask {
  const uint8_t* w = nullptr;
  size_t row_bytes = 0;
  float* y = nullptr;  // [row][rows]
  uint32_t rows = 0;
  Format format = Format::kCount;
  uint32_t first_block = 0;  // filled in by the launch
  // A float matrix may have an input of its own, [row][own_columns]; null: the batch's.
  const float* own_x = nullptr;
  uint32_t own_columns = 0;
  // Not 0: y becomes 2 sigmoid(y * gate_factor), a write gate of hyper-connections.
  float gate_factor = 0;
};
inline constexpr uint32_t kMatTasksMax = 6;
// Matrices that share an input: of one quantised type, and of float types (whatever the launched
// format is, F32, F16 and BF16 may ride along).
struct MatBatch {
  MatTask tasks[kMatTasksMax];
  uint32_t n_tasks = 0;
  uint32_t n_rows = 0;  // activation rows
  ActSource source;
  const WindowBlock* logits_only = nullptr;  // not null: only rows with needs_logits
  // The first two quantised matrices are gate and up, of as many rows: y of the first becomes
  // silu(gate) * up, y of the second is not written. For FormatKernels::swiglu.
  bool swiglu = false;
};

// A product of a matrix with few columns, whose input every block quantises for itself: no launch
// between what made x and the product. Plain: y = W x. With streams, the read of hyper-connections:
// u = silu(x / streams), up = W u of streams * rows values, y = mix of `normed` under up, and y's
// form for blocks of 32.
inline constexpr uint32_t kNarrowRows = 32;  // of one block (and stream)
inline constexpr uint32_t kNarrowThreadsMax = 320;
struct NarrowProduct {
  const uint8_t* w = nullptr;
  size_t row_bytes = 0;
  uint32_t rows = 0, columns = 0, n_rows = 0;  // rows: of one stream
  const float* x = nullptr;                    // [row][columns]
  float* y = nullptr;                          // [row][rows]
  CheckArgs check;                             // of x, or of u
  uint32_t streams = 0;                        // 0: plain
  const float* normed = nullptr;               // [row][streams][rows]
  ActForm form = {};                           // of y; base null: none
  CheckArgs y_check = {};
  // One gate per row rides along: sigmoid of what is there. Null: none.
  float* gates = nullptr;  // [row]
};

struct DequantRows {
  const uint8_t* table = nullptr;
  size_t row_bytes = 0;
  uint32_t n = 0;  // weights per row
  float* out = nullptr;
  uint32_t out_stride = 0;
  uint32_t copies = 1;                  // of each row, n floats apart
  const WindowBlock* tokens = nullptr;  // not null: row r is the table's row params.rows[r].token
};

enum class ExpertMatrix : uint32_t { kGate, kUp, kDown };
struct ExpertProduct {
  const ExpertList* list = nullptr;
  uint32_t experts_used = 0;
  uint32_t width = 0, hidden = 0;
  uint32_t n_rows = 0;
  ActSource source;      // gate, up: rows of the window; down: (row, order) pairs
  float* out = nullptr;  // [pair][width] or [pair][hidden]
  size_t row_bytes = 0;
  ExpertMatrix matrix = ExpertMatrix::kDown;  // of a single product
  uint32_t slow_blocks = 0;  // blocks that start with the list's first n_slow entries
  uint32_t blocks = 0;       // all
};

// One row per computed format; what a format has not got does not link.
struct FormatKernels {
  void (*mat)(CUstream_st* stream, const MatBatch& batch, const ProductShape& shape);
  void (*dequant)(CUstream_st* stream, const DequantRows& rows, uint32_t n_rows);
  // silu(gate) * up in one product of both; and one matrix alone.
  void (*gate_up)(CUstream_st* stream, const ExpertProduct& product, const ProductShape& shape);
  void (*expert)(CUstream_st* stream, const ExpertProduct& product, const ProductShape& shape);
  // Fused forms (dense.h). False, and nothing is launched: not for this type, shape or card.
  bool (*swiglu)(CUstream_st* stream, const MatBatch& batch, const ProductShape& shape);
  bool (*narrow)(CUstream_st* stream, const NarrowProduct& product);
};
const FormatKernels& KernelsOf(Format format);

// ---- activations
struct QuantizeArgs {
  const float* x = nullptr;
  uint32_t stride = 0, n = 0;
  ActForms forms;
  CheckArgs check;
};
void LaunchQuantize(CUstream_st* stream, const QuantizeArgs& args, uint32_t n_rows);

// Hidden vectors of the listed experts: h = silu(h) * up when `up` is given, then forms and check.
struct HiddenArgs {
  const ExpertList* list = nullptr;
  uint32_t experts_used = 0, width = 0;
  float* h = nullptr;         // [pair][width]
  const float* up = nullptr;  // null: h is complete
  ActForms forms;             // by pair
  CheckArgs check;
};
void LaunchHidden(CUstream_st* stream, const HiddenArgs& args, uint32_t n_rows);

// ---- embedding, hyper-connections
struct RopeTables {
  const float* inv_freq = nullptr;  // [pairs]
  float* sin = nullptr;             // [row][pairs]
  float* cos = nullptr;
  uint32_t pairs = 0;
};
void LaunchRopeTables(CUstream_st* stream, const RopeTables& rope, const WindowBlock* window,
                      uint32_t n_rows);

struct HcNormArgs {
  float* wide = nullptr;  // [row][streams * hidden]
  // A write before the read: wide = inject * y + wide. y null: none is due.
  const float* y = nullptr;       // [row][hidden]
  const float* inject = nullptr;  // [row][streams]
  const float* weight = nullptr;
  float* normed = nullptr;
  uint32_t streams = 0, hidden = 0;
  float eps = 0;
  ActForms forms;  // of normed; only when hidden is a multiple of 256
  CheckArgs check;
};
void LaunchHcNorm(CUstream_st* stream, const HcNormArgs& args, uint32_t n_rows);

// u = silu(low / streams) in place.
struct HcGateArgs {
  float* low = nullptr;  // [row][rank]
  uint32_t rank = 0, streams = 0;
  ActForms forms;  // of u
  CheckArgs check;
};
void LaunchHcGate(CUstream_st* stream, const HcGateArgs& args, uint32_t n_rows);

struct HcMixArgs {
  const float* up = nullptr;  // [row][streams * hidden]
  const float* normed = nullptr;
  float* x = nullptr;  // [row][hidden]
  uint32_t streams = 0, hidden = 0;
  ActForms forms;  // of x
  CheckArgs check;
};
void LaunchHcMix(CUstream_st* stream, const HcMixArgs& args, uint32_t n_rows);

struct HcWriteArgs {
  const float* y = nullptr;       // [row][hidden]
  const float* inject = nullptr;  // [row][streams]
  float* wide = nullptr;
  uint32_t streams = 0, hidden = 0;
};
void LaunchHcWrite(CUstream_st* stream, const HcWriteArgs& args, uint32_t n_rows);

// ---- n-gram layer
struct PleArgs {
  const float *key = nullptr, *value = nullptr;  // products: [row][streams * hidden], [row][hidden]
  const float *norm_key = nullptr, *norm_query = nullptr, *norm_conv = nullptr;
  const float* conv_weight = nullptr;  // [tap][streams * hidden]
  float* ring = nullptr;               // [slot][kPleRing][streams * hidden]
  float* gated = nullptr;              // scratch [row][streams * hidden]
  float* wide = nullptr;
  uint32_t streams = 0, hidden = 0, taps = 0, dilation = 0;
  float eps = 0;
  const WindowBlock* window = nullptr;
};
void LaunchPle(CUstream_st* stream, const PleArgs& args, uint32_t n_rows);

// ---- Gated DeltaNet
struct DeltaShape {
  uint32_t key_heads = 0, value_heads = 0, dim = 0, taps = 0;
};
bool DeltaShapeIsKnown(const DeltaShape& shape);
struct DeltaConvArgs {
  DeltaShape shape;
  const float* qkv = nullptr;  // [row][2 * key heads + value heads][dim], of this window
  const float *beta_in = nullptr, *alpha_in = nullptr;  // [row][value heads]
  const float* conv_weight = nullptr;                   // [tap][channel]
  const float *a = nullptr, *dt = nullptr;
  float* query = nullptr;  // [row][key heads][dim]
  float *conv = nullptr, *key = nullptr, *value = nullptr, *beta = nullptr,
        *decay = nullptr;  // rings
  const WindowBlock* window = nullptr;
};
void LaunchDeltaConv(CUstream_st* stream, const DeltaConvArgs& args, uint32_t n_rows);
struct DeltaStepArgs {
  DeltaShape shape;
  float* s = nullptr;
  uint32_t* folded = nullptr;
  const float *key = nullptr, *value = nullptr, *beta = nullptr, *decay = nullptr;  // rings
  const float* query = nullptr;
  float* out = nullptr;          // [row][value heads][dim]
  uint32_t* finished = nullptr;  // a zero: counts blocks, is zero again at the end
  const WindowBlock* window = nullptr;
};
void LaunchDeltaSteps(CUstream_st* stream, const DeltaStepArgs& args, uint32_t n_seqs);
struct DeltaGateArgs {
  float* o = nullptr;  // [row][value heads][dim], in place
  const float* z = nullptr;
  const float* norm = nullptr;
  uint32_t heads = 0, dim = 0;
  float eps = 0;
  ActForms forms;
  CheckArgs check;
};
void LaunchDeltaGate(CUstream_st* stream, const DeltaGateArgs& args, uint32_t n_rows);

// ---- attention
struct AttentionShape {
  uint32_t heads = 0, kv_heads = 0, dim = 0, index_heads = 0, index_dim = 0, pairs = 0;
  uint32_t index_block = 0, blocks_best = 0;  // tokens; how many blocks a row may select
  float eps = 0;
};
// The KV cache of one layer; see AttentionState and KvBlockLayout.
struct KvCache {
  KvType type = KvType::kQ8;
  size_t cell_bytes = 0, v = 0, k_scales = 0, v_scales = 0, index = 0, block_bytes = 0;
  uint8_t* pool = nullptr;
  const uint32_t* block_tables = nullptr;
  uint32_t blocks_per_sequence = 0;
  float* raw_index = nullptr;
};
struct AttentionStoreArgs {
  AttentionShape shape;
  KvCache cache;
  RopeTables rope;
  float *q = nullptr, *k = nullptr, *v = nullptr;  // products; q: [row][head][query | gate]
  float *index_q = nullptr, *index_k = nullptr;
  const float *q_norm = nullptr, *k_norm = nullptr, *index_q_norm = nullptr,
              *index_k_norm = nullptr;
  CheckArgs check;
};
void LaunchAttentionStore(CUstream_st* stream, const AttentionStoreArgs& args, uint32_t n_rows);
struct AttentionSelectArgs {
  AttentionShape shape;
  KvCache cache;
  const float* index_q = nullptr;
  float* scores = nullptr;  // [row][blocks_max]
  uint32_t blocks_max = 0;
  uint32_t* cells = nullptr;  // [row][cells_max]
  uint32_t cells_max = 0;
  uint32_t* n_cells = nullptr;  // [row]
  uint32_t* arrived = nullptr;  // [row], zeros: counts blocks, is zero again at the end
  const WindowBlock* window = nullptr;
};
void LaunchAttentionSelect(CUstream_st* stream, const AttentionSelectArgs& args, uint32_t n_rows,
                           uint32_t multiprocessors);
struct AttendLaunch {
  AttentionShape shape;
  KvCache cache;
  const float* q = nullptr;
  const uint32_t* cells = nullptr;
  uint32_t cells_max = 0;
  const uint32_t* n_cells = nullptr;
  float* scores = nullptr;       // [row][head][cells_max]
  float* chunk_total = nullptr;  // [row][head][chunks]
  float* chunk_sum = nullptr;    // [row][head][chunks][dim]
  float* out = nullptr;          // [row][head][dim]
  ActForms forms;
  CheckArgs check;
};
void LaunchAttend(CUstream_st* stream, const AttendLaunch& args, uint32_t n_rows);

// ---- router, shared expert, combination
// Router logits of a float matrix with up to kRouterColumnsMax columns; forms of x that are still
// missing are made by blocks of the same launch. False, and nothing is launched: another shape.
inline constexpr uint32_t kRouterColumnsMax = 2560;
struct RouterArgs {
  const uint8_t* w = nullptr;
  size_t row_bytes = 0;
  Format format = Format::kCount;  // F32, F16 or BF16
  const float* x = nullptr;        // [row][columns]
  uint32_t columns = 0, experts = 0;
  float* logits = nullptr;  // [row][experts]
  ActForms forms;           // of x
  CheckArgs check;
};
bool LaunchRouter(CUstream_st* stream, const RouterArgs& args, uint32_t n_rows);
struct RouteArgs {
  const float* logits = nullptr;  // [row][experts]
  uint32_t experts = 0, used = 0;
  RoutedRow* routed = nullptr;
};
void LaunchRoute(CUstream_st* stream, const RouteArgs& args, uint32_t n_rows);
struct SharedHiddenArgs {
  float* gate = nullptr;  // [row][width]: becomes the hidden vector; is it when `up` is null
  const float* up = nullptr;
  uint32_t width = 0;
  float* inject = nullptr;  // [row]: the gate's dot, becomes sigmoid of it
  ActForms forms;
  CheckArgs check;
};
void LaunchSharedHidden(CUstream_st* stream, const SharedHiddenArgs& args, uint32_t n_rows);
struct CombineArgs {
  const RoutedRow* routed = nullptr;
  uint32_t used = 0, hidden = 0;
  const float* shared = nullptr;       // [row][hidden]
  const float* shared_gate = nullptr;  // [row]
  float* y = nullptr;
  const float* const* table = nullptr;  // device memory, [row * used + order]; or:
  const float* direct[kWindowRowsMax * kExpertsUsedMax] = {};
};
void LaunchCombine(CUstream_st* stream, const CombineArgs& args, uint32_t n_rows);

}  // namespace lode::cuda
