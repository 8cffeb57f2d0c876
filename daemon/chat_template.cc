// See chat_template.h. Parts that arrive as JSON are checked and spliced into the request as they
// are: their key order is what the template prints, and no deep value is ever walked here.

#include "daemon/chat_template.h"

#include <unistd.h>

#include <algorithm>
#include <climits>
#include <optional>

#include "daemon/template_process.h"
#include "nlohmann/json.hpp"
#include "shared/base/check.h"

namespace lode {
namespace {

using nlohmann::json;

constexpr const char* kHelperName = "lode-template-helper.py";
// JSON escapes at most six bytes for one ("\u0000"), and the answer has a frame around the text.
constexpr size_t kEscapeFactor = 6;
constexpr size_t kAnswerFrameBytes = 64 * 1024;
constexpr size_t kDeadlineBytes = 1 << 20;
// Tool schemas nest about ten levels. JSON libraries on both sides recurse, so a bound is needed;
// Python's is near 300.
constexpr size_t kJsonDepthMax = 64;

std::string JsonString(const std::string& text) {
  return json(text).dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace);
}

// First character that is not white space decides what an accepted JSON text is.
char JsonKind(const std::string& text) {
  size_t at = text.find_first_not_of(" \t\r\n");
  return at == std::string::npos ? '\0' : text[at];
}

// Deepest nesting of a JSON text; brackets inside strings do not count.
size_t JsonDepth(const std::string& text) {
  size_t depth = 0, deepest = 0;
  bool in_string = false;
  for (size_t i = 0; i < text.size(); ++i) {
    char c = text[i];
    if (in_string) {
      if (c == '\\') ++i;
      if (c == '"') in_string = false;
    } else if (c == '"') {
      in_string = true;
    } else if (c == '[' || c == '{') {
      deepest = std::max(deepest, ++depth);
    } else if (c == ']' || c == '}') {
      --depth;
    }
  }
  return deepest;
}

Status CheckJson(const std::string& text, char opening, const std::string& what) {
  if (!json::accept(text)) return InvalidArgument("{} is not valid JSON", what);
  if (JsonDepth(text) > kJsonDepthMax) {
    return InvalidArgument("in {} values nest more than {} levels deep", what, kJsonDepthMax);
  }
  if (opening != '\0' && JsonKind(text) != opening) {
    return InvalidArgument("{} must be a JSON {}", what, opening == '[' ? "array" : "object");
  }
  return OkStatus();
}

void AppendMember(const char* key, const std::string& value_json, std::string* out) {
  if (out->back() != '{') out->push_back(',');
  *out += fmt::format("\"{}\":", key);
  *out += value_json;
}

Status AppendMessage(const ChatMessage& message, size_t index, std::string* out) {
  out->push_back('{');
  AppendMember("role", JsonString(message.role), out);
  if (!message.content_json.empty()) {
    LODE_RETURN_IF_ERROR(
        CheckJson(message.content_json, '\0', fmt::format("the content of message {}", index)));
    AppendMember("content", message.content_json, out);
  } else {
    AppendMember("content", JsonString(message.content), out);
  }
  if (!message.tool_calls_json.empty()) {
    LODE_RETURN_IF_ERROR(
        CheckJson(message.tool_calls_json, '[', fmt::format("tool_calls of message {}", index)));
    AppendMember("tool_calls", message.tool_calls_json, out);
  }
  const std::pair<const char*, const std::string*> optional[] = {
      {"reasoning_content", &message.reasoning_content},
      {"name", &message.name},
      {"tool_call_id", &message.tool_call_id}};
  for (const auto& [key, value] : optional) {
    if (!value->empty()) AppendMember(key, JsonString(*value), out);
  }
  out->push_back('}');
  return OkStatus();
}

}  // namespace

struct ChatTemplate::Job {
  std::string request;
  std::optional<StatusOr<std::string>> answer;
};

std::string DefaultTemplateHelperPath() {
  char self[PATH_MAX];
  ssize_t n = readlink("/proc/self/exe", self, sizeof(self));
  std::string folder = n > 0 ? std::string(self, static_cast<size_t>(n)) : std::string();
  folder.resize(folder.rfind('/') == std::string::npos ? 0 : folder.rfind('/'));
  const std::string places[] = {"/", "/../libexec/lode/", "/../libexec/"};
  for (const std::string& place : places) {
    std::string path = folder + place + kHelperName;
    if (access(path.c_str(), R_OK) == 0) return path;
  }
  return folder + places[0] + kHelperName;
}

ChatTemplate::ChatTemplate(std::string source, ChatTemplateOptions options)
    : source_(std::move(source)), options_(std::move(options)) {}

StatusOr<std::unique_ptr<ChatTemplate>> ChatTemplate::Create(std::string source,
                                                             ChatTemplateOptions options) {
  if (source.empty()) {
    return FailedPrecondition(
        "the model file has no chat template; use completion instead of chat");
  }
  if (source.size() > options.request_bytes_max) {
    return FailedPrecondition("the model's chat template has {} bytes; at most {} are supported",
                              source.size(), options.request_bytes_max);
  }
  if (options.script_path.empty()) options.script_path = DefaultTemplateHelperPath();
  std::unique_ptr<ChatTemplate> t(new ChatTemplate(std::move(source), std::move(options)));
  t->process_ = std::make_unique<TemplateProcess>(
      TemplateProcess::Options{t->options_.python_path, t->options_.script_path,
                               t->options_.memory_bytes, t->options_.start_timeout});
  t->thread_ = std::thread([raw = t.get()] { raw->Serve(); });
  LODE_RETURN_IF_ERROR(t->RunJob({}).status());
  return t;
}

ChatTemplate::~ChatTemplate() {
  {
    std::lock_guard lock(mutex_);
    ending_ = true;
  }
  changed_.notify_all();
  if (thread_.joinable()) thread_.join();
}

StatusOr<RenderedChat> ChatTemplate::Render(const ChatRequest& request) {
  LODE_ASSIGN_OR_RETURN(std::string text, RequestJson(request));
  LODE_ASSIGN_OR_RETURN(std::string answer, RunJob(std::move(text)));
  return ReadAnswer(answer);
}

uint64_t ChatTemplate::helper_starts() {
  std::lock_guard lock(mutex_);
  return starts_;
}

StatusOr<std::string> ChatTemplate::RequestJson(const ChatRequest& request) const {
  std::string out = "{";
  AppendMember("template", JsonString(source_), &out);
  std::string messages = "[";
  for (size_t i = 0; i < request.messages.size(); ++i) {
    if (i > 0) messages.push_back(',');
    LODE_RETURN_IF_ERROR(AppendMessage(request.messages[i], i, &messages));
  }
  AppendMember("messages", messages + "]", &out);
  if (!request.tools_json.empty()) {
    LODE_RETURN_IF_ERROR(CheckJson(request.tools_json, '[', "the list of tools"));
  }
  // Templates test `if tools`; an empty list counts as none, as it does there.
  AppendMember("tools", request.tools_json.empty() ? "null" : request.tools_json, &out);

  json variables = json::object();
  if (!request.variables_json.empty()) {
    LODE_RETURN_IF_ERROR(
        CheckJson(request.variables_json, '{', "the list of the template's variables"));
    variables = json::parse(request.variables_json, nullptr, /*allow_exceptions=*/false);
  }
  variables["add_generation_prompt"] = request.add_generation_prompt;
  AppendMember("variables",
               variables.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace),
               &out);
  json names = json::object();
  for (const auto& [name, value] : options_.special_tokens) names[name] = value;
  AppendMember("special_tokens",
               names.dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace), &out);
  AppendMember("control_tokens",
               json(options_.control_tokens)
                   .dump(-1, ' ', /*ensure_ascii=*/false, json::error_handler_t::replace),
               &out);
  AppendMember("output_bytes_max", std::to_string(options_.output_bytes_max), &out);
  auto seconds = std::chrono::ceil<std::chrono::seconds>(DeadlineFor(out.size())).count();
  AppendMember("cpu_seconds", std::to_string(seconds), &out);
  out.push_back('}');
  if (out.size() > options_.request_bytes_max) {
    return ResourceExhausted("the conversation has {} bytes; the chat template takes at most {}",
                             out.size(), options_.request_bytes_max);
  }
  return out;
}

// The ordinary case is a few kilobytes in well below a millisecond; a conversation of many
// megabytes is read, walked and written several times on its way.
std::chrono::milliseconds ChatTemplate::DeadlineFor(size_t request_bytes) const {
  return options_.deadline * (1 + request_bytes / kDeadlineBytes);
}

StatusOr<std::string> ChatTemplate::RunJob(std::string request) {
  std::unique_lock lock(mutex_);
  if (!changed_.wait_for(lock, options_.queue_timeout, [&] { return !busy_; })) {
    return Unavailable("the chat template helper was busy for {} ms; try again",
                       options_.queue_timeout.count());
  }
  busy_ = true;
  Job job;
  job.request = std::move(request);
  job_ = &job;
  changed_.notify_all();
  // Bounded by the deadlines of the thread's own waits (start, exchange, end of a killed helper).
  changed_.wait(lock, [&] { return job.answer.has_value(); });
  busy_ = false;
  changed_.notify_all();
  return *std::move(job.answer);
}

void ChatTemplate::Serve() {
  size_t answer_bytes_max = kEscapeFactor * options_.output_bytes_max + kAnswerFrameBytes;
  std::unique_lock lock(mutex_);
  while (true) {
    changed_.wait(lock, [&] { return job_ != nullptr || ending_; });
    if (job_ == nullptr) break;
    Job* job = std::exchange(job_, nullptr);
    lock.unlock();
    StatusOr<std::string> answer = std::string();
    const auto deadline = DeadlineFor(job->request.size());
    Status started = process_->Start();
    if (!started.ok()) {
      answer = started;
    } else if (!job->request.empty()) {
      answer = process_->Exchange(job->request, answer_bytes_max,
                                  TemplateProcess::Clock::now() + deadline);
    }
    if (started.ok() && absl::IsDeadlineExceeded(answer.status())) {
      answer = DeadlineExceeded(
          "the chat template did not end within {} ms on a conversation of {} bytes",
          deadline.count(), job->request.size());
    } else if (started.ok() && !answer.ok()) {
      answer = Unavailable("the chat template helper failed while rendering: {}",
                           Message(answer.status()));
    }
    lock.lock();
    starts_ = process_->starts();
    job->answer = std::move(answer);
    changed_.notify_all();
  }
  lock.unlock();
  process_->Stop();
}

StatusOr<RenderedChat> ChatTemplate::ReadAnswer(const std::string& answer) {
  json body = json::parse(answer, nullptr, /*allow_exceptions=*/false);
  if (!body.is_object() || !body.contains("ok") || !body["ok"].is_boolean()) {
    return Unavailable("the chat template helper answered something unreadable");
  }
  auto text = [&](const char* key) {
    return body.contains(key) && body[key].is_string() ? body[key].get<std::string>()
                                                       : std::string();
  };
  if (body["ok"].get<bool>()) {
    RenderedChat rendered;
    rendered.text = text("text");
    if (const auto marks = body.find("marks"); marks != body.end() && marks->is_array()) {
      for (const json& mark : *marks) {
        if (!mark.is_number_unsigned())
          return Unavailable("the chat template helper answered something unreadable");
        rendered.marks.push_back(mark.get<size_t>());
      }
    }
    return rendered;
  }
  std::string kind = text("kind"), error = text("error");
  if (kind == "raised") return InvalidArgument("the chat template refuses the messages: {}", error);
  if (kind == "limit") return ResourceExhausted("the chat template was stopped: {}", error);
  return InvalidArgument("the chat template fails on these messages: {}", error);
}

}  // namespace lode
