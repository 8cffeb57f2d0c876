// Chat messages to prompt text, by the Jinja template that the model file brings along.
//
// Templates are programs from an untrusted file, and the models were trained with the output of
// real Jinja. So real Jinja renders them, sandboxed, in a confined helper process
// (daemon/template_helper/render.py): a template that loops, eats memory or crashes costs its own
// request and the helper, never the daemon. Calls are serialised; one takes well below a
// millisecond for ordinary templates. A thread of its own talks to the helper. Any thread may call
// Render.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "shared/base/status.h"

namespace lode {

class TemplateProcess;

// Where render.py is: beside the running binary, else in ../libexec/lode or ../libexec next to its
// folder. When it is in none of them, the first place, which then appears in the error of Create.
std::string DefaultTemplateHelperPath();

struct ChatTemplateOptions {
  std::string python_path = "/usr/bin/python3";
  std::string script_path;  // empty: DefaultTemplateHelperPath()
  // Names the template may use, e.g. {"bos_token", "<|endoftext|>"}.
  std::vector<std::pair<std::string, std::string>> special_tokens;
  // Spellings of the model's control tokens. Only the template's own text may produce them: a
  // message that spells one stays text (RenderedChat::marks). Tags that the template itself looks
  // for in messages, "<think>" for one, are let through.
  std::vector<std::string> control_tokens;
  std::chrono::milliseconds deadline{2000};  // one rendering; as much again per MiB of the request
  std::chrono::milliseconds start_timeout{
      10'000};  // start of the helper; slow only while a disk is busy
  std::chrono::milliseconds queue_timeout{10'000};  // turn among the callers
  uint64_t memory_bytes = 512u << 20;    // address space of the helper, its own 60 MB included
  size_t request_bytes_max = 16u << 20;  // template, messages and tools as JSON
  size_t output_bytes_max = 16u << 20;   // rendered text: four times a context of a million tokens
};

struct ChatMessage {
  std::string role;
  std::string content;
  std::string
      content_json;  // if not empty, JSON that replaces `content` (a list of parts, or null)
  std::string reasoning_content;  // left out when empty
  std::string tool_calls_json;    // JSON array; left out when empty. Arguments may be objects or
                                  // strings of JSON
  std::string name;               // left out when empty
  std::string tool_call_id;       // left out when empty
};

struct ChatRequest {
  std::vector<ChatMessage> messages;
  std::string tools_json;      // JSON array; empty: the template sees none
  std::string variables_json;  // JSON object of further variables (enable_thinking,
                               // reasoning_effort...); may be empty
  bool add_generation_prompt = true;
};

struct RenderedChat {
  std::string text;
  // Byte offsets, ascending: no control token of `text` lies across one (begin < mark < end). They
  // stand inside the spellings that came from the client.
  std::vector<size_t> marks;
};

class ChatTemplate {
 public:
  // `source` is the template's text. Starts the helper, so that a machine without Jinja is found at
  // once and the first request does not pay for the start. Errors: FailedPrecondition (no template,
  // no Python, no Jinja).
  static StatusOr<std::unique_ptr<ChatTemplate>> Create(std::string source,
                                                        ChatTemplateOptions options);
  ~ChatTemplate();
  ChatTemplate(const ChatTemplate&) = delete;
  ChatTemplate& operator=(const ChatTemplate&) = delete;

  // The prompt. Errors:
  //   InvalidArgument: the template refused the messages (its own words), failed on them, or the
  //   request is no JSON ResourceExhausted: a limit of size, memory or nesting DeadlineExceeded: it
  //   did not end in time Unavailable: the helper died or too many callers wait; trying again is
  //   sensible FailedPrecondition: the helper cannot be started any more
  StatusOr<RenderedChat> Render(const ChatRequest& request);

  uint64_t helper_starts();  // 1 unless a helper had to be replaced

 private:
  struct Job;

  ChatTemplate(std::string source, ChatTemplateOptions options);
  StatusOr<std::string> RequestJson(const ChatRequest& request) const;
  StatusOr<std::string> RunJob(std::string request);  // an empty request only starts the helper
  void Serve();                                       // the thread
  static StatusOr<RenderedChat> ReadAnswer(const std::string& answer);
  std::chrono::milliseconds DeadlineFor(size_t request_bytes) const;

  const std::string source_;
  const ChatTemplateOptions options_;

  std::mutex mutex_;  // guards the members below
  std::condition_variable changed_;
  bool busy_ = false;   // some caller's job is being done
  Job* job_ = nullptr;  // owned by the caller, until done
  bool ending_ = false;
  uint64_t starts_ = 0;

  std::unique_ptr<TemplateProcess> process_;  // thread_ only
  std::thread thread_;
};

}  // namespace lode
