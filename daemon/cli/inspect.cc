// `lode inspect MODEL`: what a file holds and what would fit where, without loading it. Offline.
#include <algorithm>
#include <cstdio>
#include <map>
#include <string>
#include <vector>

#include "daemon/cli/commands.h"
#include "kernels/formats.h"
#include "shared/model/model_source.h"

namespace lode::cli {
namespace {

constexpr double kGB = 1e9;

struct Sizes {
  uint64_t experts = 0, dense = 0, table = 0, head = 0, total = 0;
};

bool IsExpert(const std::string& name) { return name.find("_exps.") != std::string::npos; }
bool InDraftHead(const std::string& name, uint32_t layers) {
  return name.rfind("blk." + std::to_string(layers) + ".", 0) == 0;
}

Sizes Sum(const ModelSource& source) {
  Sizes sizes;
  for (const TensorInfo& t : source.tensors()) {
    sizes.total += t.bytes;
    if (InDraftHead(t.name, source.config().layers)) {
      sizes.head += t.bytes;
    } else if (IsExpert(t.name)) {
      sizes.experts += t.bytes;
    } else if (t.name == "per_layer_token_embd.weight") {
      sizes.table += t.bytes;
    } else {
      sizes.dense += t.bytes;
    }
  }
  return sizes;
}

const char* TypeName(TensorType type) {
  const TensorTypeInfo* info = FindTensorType(static_cast<uint32_t>(type));
  return info ? info->name : "?";
}

void PrintTypes(const ModelSource& source) {
  struct Row {
    uint64_t tensors = 0, bytes = 0;
  };
  std::map<std::string, Row> rows;
  for (const TensorInfo& t : source.tensors()) {
    Row& row = rows[TypeName(t.type)];
    ++row.tensors;
    row.bytes += t.bytes;
  }
  std::vector<std::pair<std::string, Row>> sorted(rows.begin(), rows.end());
  std::sort(sorted.begin(), sorted.end(),
            [](const auto& a, const auto& b) { return a.second.bytes > b.second.bytes; });
  std::printf("\n%-10s %8s %12s  %s\n", "type", "tensors", "GB", "computed here");
  for (const auto& [name, row] : sorted) {
    bool computed = false;
    for (const FormatInfo& format : kFormats) computed |= name == format.name;
    std::printf("%-10s %8llu %12.3f  %s\n", name.c_str(),
                static_cast<unsigned long long>(row.tensors), static_cast<double>(row.bytes) / kGB,
                computed ? "yes" : "not yet");
  }
}

// Expert bytes of one token: every layer reads experts_used experts.
uint64_t ExpertBytesPerToken(const ModelSource& source) {
  uint64_t bytes = 0;
  const ModelConfig& c = source.config();
  for (const TensorInfo& t : source.tensors()) {
    if (IsExpert(t.name) && !InDraftHead(t.name, c.layers))
      bytes += t.bytes / c.experts * c.experts_used;
  }
  return bytes;
}

void PrintFit(const ModelSource& source, const Sizes& sizes) {
  const ModelConfig& c = source.config();
  const uint64_t pairs = static_cast<uint64_t>(c.layers) * c.experts;
  std::printf("\nWhat goes where\n");
  std::printf("  RAM, pinned: all experts               %10.3f GB\n",
              static_cast<double>(sizes.experts) / kGB);
  std::printf("  VRAM, always: dense weights            %10.3f GB\n",
              static_cast<double>(sizes.dense) / kGB);
  std::printf("  disk, read by row: n-gram table        %10.3f GB\n",
              static_cast<double>(sizes.table) / kGB);
  if (sizes.head)
    std::printf("  VRAM with drafts: draft head           %10.3f GB\n",
                static_cast<double>(sizes.head) / kGB);
  std::printf("  read per token: experts                %10.4f GB, dense %.4f GB\n",
              static_cast<double>(ExpertBytesPerToken(source)) / kGB,
              static_cast<double>(sizes.dense) / kGB);
  // Cards people have; two gigabytes stay for KV, state and the driver.
  constexpr double kReserveGB = 2;
  for (double card : {8.0, 12.0, 16.0, 24.0, 32.0, 48.0}) {
    const double left = card * 1.073741824 - kReserveGB - static_cast<double>(sizes.dense) / kGB;
    const double share = left <= 0 || sizes.experts == 0
                             ? 0
                             : std::min(1.0, left / (static_cast<double>(sizes.experts) / kGB));
    if (left <= 0) {
      std::printf("  a %2.0f GiB card: too small for the dense weights (%.1f GB missing)\n", card,
                  -left);
    } else {
      std::printf("  a %2.0f GiB card: %5.1f %% of the experts in VRAM (%llu of %llu)\n", card,
                  share * 100, static_cast<unsigned long long>(share * static_cast<double>(pairs)),
                  static_cast<unsigned long long>(pairs));
    }
  }
}

}  // namespace

Status Inspect(const std::string& model, bool tensors) {
  LODE_ASSIGN_OR_RETURN(const auto source, ModelSource::Open(model));
  const ModelConfig& c = source->config();
  const Sizes sizes = Sum(*source);
  std::printf("%s\n%s%s%s\n", source->description().c_str(), c.arch.c_str(),
              c.name.empty() ? "" : ", ", c.name.c_str());
  uint32_t attention = 0;
  for (uint8_t a : c.is_attention) attention += a;
  std::printf("layers     %u (%u attention, %u DeltaNet)%s\n", c.layers, attention,
              c.layers - attention, c.nextn_layers ? ", and a draft head" : "");
  std::printf("width      %u x %u streams, vocabulary %u, trained context %u\n", c.hidden,
              c.streams, c.vocab, c.context);
  std::printf("attention  %u heads of %u, %u KV heads; selects %u tokens in blocks of %u\n",
              c.heads, c.head_dim, c.kv_heads, c.index_top_k, c.index_block);
  std::printf("experts    %u per layer, %u used, width %u; shared expert %u\n", c.experts,
              c.experts_used, c.expert_width, c.shared_width);
  std::printf("tensors    %zu, %.3f GB\n", source->tensors().size(),
              static_cast<double>(sizes.total) / kGB);
  PrintTypes(*source);
  PrintFit(*source, sizes);
  if (const Status computable = CheckComputable(*source); !computable.ok()) {
    std::printf("\nThis build cannot run it yet: %s\n", Message(computable).c_str());
  }
  if (tensors) {
    std::printf("\n%-44s %-8s %14s  %s\n", "tensor", "type", "bytes", "ne");
    for (const TensorInfo& t : source->tensors()) {
      std::printf(
          "%-44s %-8s %14llu  %llu x %llu x %llu x %llu\n", t.name.c_str(), TypeName(t.type),
          static_cast<unsigned long long>(t.bytes), static_cast<unsigned long long>(t.ne[0]),
          static_cast<unsigned long long>(t.ne[1]), static_cast<unsigned long long>(t.ne[2]),
          static_cast<unsigned long long>(t.ne[3]));
    }
  }
  return OkStatus();
}

}  // namespace lode::cli
