// What a finished window means for a sequence: accept rows, append the picked tokens, look for the
// end (stop tokens, stop strings, limits), make the text. The only writer of a sequence's state
// after a window. Step 10 of the life of a token. Pure apart from the sequence it is given;
// scheduler thread.
#pragma once

#include <cstdint>

#include "daemon/sequence.h"
#include "shared/wire/window_plan.h"
#include "shared/wire/window_result.h"

namespace lode {

struct Committed {
  StreamEvent event;           // event.finish is set when the answer ended here
  bool has_event = false;      // false: nothing to send
  uint32_t answer_tokens = 0;  // appended by this window
  uint32_t prompt_rows = 0;    // rows of its prompt that ran
};

// Applies the rows of plan.seqs[seq_index], which belongs to `sequence`, of a window that ended
// with kOk. A result that makes no sense (token out of the vocabulary) finishes the sequence with
// kError.
Committed CommitRows(const WindowPlan& plan, const WindowResult& result, uint32_t seq_index,
                     uint32_t vocab, uint64_t now_ns, Sequence* sequence);

// The last event of a sequence that ends for another reason (cancel, deadline, engine error).
StreamEvent FinishNow(Sequence* sequence, FinishReason reason, Status error, uint64_t now_ns);

}  // namespace lode
