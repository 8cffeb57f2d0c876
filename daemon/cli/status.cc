// `lode status` and `lode tokenize`: small questions to a running daemon.
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "daemon/cli/commands.h"
#include "daemon/utf8.h"

namespace lode::cli {
namespace {

constexpr std::chrono::seconds kAnswer{10};
constexpr size_t kCountBytes = 1 << 20;  // of a corpus in one call

}  // namespace

Status CheckUtf8(std::string_view what, std::string_view text) {
  const size_t valid = ValidUtf8Prefix(text);
  if (valid == text.size()) return OkStatus();
  return InvalidArgument("{} is not UTF-8: byte {} ({:#04x}) begins no character", what, valid,
                         static_cast<unsigned char>(text[valid]));
}

Status ShowStatus(ConnectOptions connect, bool json) {
  connect.wait_ready = false;
  LODE_ASSIGN_OR_RETURN(const auto client, Client::Connect(connect));
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + kAnswer);
  v1::StatusResponse s;
  LODE_RETURN_IF_ERROR(FromGrpc(client->stub().Status(&call, {}, &s)));
  if (json) {
    google::protobuf::util::JsonPrintOptions options;
    options.add_whitespace = true;
    options.always_print_primitive_fields = true;
    options.preserve_proto_field_names = true;
    std::string text;
    if (!google::protobuf::util::MessageToJsonString(s, &text, options).ok())
      return Internal("the status cannot be printed as JSON");
    std::printf("%s\n", text.c_str());
    return OkStatus();
  }
  std::printf("%s  %s (lode %s, up %.0f s) on %s\n", s.state().c_str(), s.detail().c_str(),
              s.version().c_str(), s.uptime_seconds(), client->target().c_str());
  std::printf("model      %s\n", s.model().c_str());
  std::printf("served     %llu requests, %llu tokens\n",
              static_cast<unsigned long long>(s.requests()),
              static_cast<unsigned long long>(s.tokens()));
  std::printf("sequences  %u running, %u queued, %u slots\n", s.running(), s.queued(), s.slots());
  std::printf("kv blocks  %u of %u free (256 tokens each)\n", s.kv_blocks_free(), s.kv_blocks());
  std::printf("experts    hit_rate %.3f, pcie_share %.3f (last 256 windows)\n", s.hit_rate(),
              s.pcie_share());
  for (const v1::Worker& w : s.workers()) {
    std::printf("%-10s %s, pid %d, %u restarts  %s\n", w.name().c_str(), w.state().c_str(), w.pid(),
                w.restarts(), w.detail().c_str());
  }
  for (const auto& [key, value] : s.facts()) std::printf("%-10s %s\n", key.c_str(), value.c_str());
  return OkStatus();
}

Status Tokenize(const ConnectOptions& connect, const std::string& text, bool raw) {
  LODE_RETURN_IF_ERROR(CheckUtf8("the text", text));
  LODE_ASSIGN_OR_RETURN(const auto client, Client::Connect(connect));
  grpc::ClientContext call;
  call.set_deadline(std::chrono::system_clock::now() + kAnswer);
  v1::TokenizeRequest request;
  request.set_text(text);
  request.set_raw_text(raw);
  v1::TokenizeResponse response;
  LODE_RETURN_IF_ERROR(FromGrpc(client->stub().Tokenize(&call, request, &response)));
  for (int i = 0; i < response.ids_size(); ++i)
    std::printf("%d\t%s\n", response.ids(i), response.pieces(i).c_str());
  std::fprintf(stderr, "%d tokens\n", response.ids_size());
  return OkStatus();
}

Status CountTokens(const ConnectOptions& connect, std::istream& in, bool raw) {
  LODE_ASSIGN_OR_RETURN(const auto client, Client::Connect(connect));
  std::map<int32_t, uint64_t> counts;
  v1::TokenizeRequest request;
  request.set_raw_text(raw);
  const auto count = [&]() -> Status {
    grpc::ClientContext call;
    call.set_deadline(std::chrono::system_clock::now() + kAnswer);
    v1::TokenizeResponse response;
    LODE_RETURN_IF_ERROR(FromGrpc(client->stub().Tokenize(&call, request, &response)));
    for (const int32_t id : response.ids()) ++counts[id];
    request.clear_text();
    return OkStatus();
  };
  // Tokens seldom cross a line's end, so a corpus may be cut there.
  for (std::string line; std::getline(in, line);) {
    *request.mutable_text() += line + "\n";
    if (request.text().size() >= kCountBytes) LODE_RETURN_IF_ERROR(count());
  }
  if (!request.text().empty()) LODE_RETURN_IF_ERROR(count());
  std::vector<std::pair<int32_t, uint64_t>> order(counts.begin(), counts.end());
  std::stable_sort(order.begin(), order.end(),
                   [](const auto& a, const auto& b) { return a.second > b.second; });
  for (const auto& [id, n] : order)
    std::printf("%d %llu\n", id, static_cast<unsigned long long>(n));
  return OkStatus();
}

}  // namespace lode::cli
