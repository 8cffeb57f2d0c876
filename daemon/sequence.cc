// See daemon/sequence.h.
#include "daemon/sequence.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

namespace lode {

StatusOr<std::unique_ptr<Sequence>> Sequence::Create(Request request,
                                                     std::shared_ptr<RequestStream> stream,
                                                     const Tokenizer* tokenizer, uint64_t now_ns) {
  LODE_ASSIGN_OR_RETURN(StopMatcher matcher, StopMatcher::Create(request.stop));
  Detokenizer::Options text;
  text.keep_special = request.keep_special;
  std::unique_ptr<Sequence> sequence(
      new Sequence(std::move(matcher), Detokenizer(tokenizer, text)));
  sequence->tokens = request.prompt;
  sequence->tokens.reserve(request.prompt.size() + request.max_tokens);
  sequence->usage.prompt_tokens = static_cast<uint32_t>(request.prompt.size());
  sequence->request = std::move(request);
  sequence->stream = std::move(stream);
  sequence->submitted_ns = now_ns;
  return sequence;
}

uint64_t ChainLogitsHash(uint64_t hash, uint64_t row_hash) {
  uint64_t words[2] = {hash, row_hash};
  return XXH3_64bits(words, sizeof(words));
}

}  // namespace lode
