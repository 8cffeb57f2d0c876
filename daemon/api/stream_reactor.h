// One answer stream of the gRPC service: takes events from a RequestStream and writes one at a
// time, so a client that does not read holds back only its own sequence.
//
// Three parties touch it: a preparation thread (Start), gRPC's threads (On*), and the engine's
// loop, whose notification only posts to the writer thread: serialising and socket calls never
// delay a window. The gRPC library may end the object as soon as Finish was called, so whoever can
// call Finish holds its own reference to the Link, which has the lock and outlives the object.
#pragma once

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <atomic>
#include <boost/asio/post.hpp>
#include <boost/asio/thread_pool.hpp>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <utility>

#include "daemon/api/translate.h"

namespace lode {

inline grpc::Status ToGrpc(const Status& status) {
  return grpc::Status(static_cast<grpc::StatusCode>(status.raw_code()), Message(status));
}

// A request that the engine never saw. (Those that it refuses it counts itself.)
inline void CountRefusal(const ApiContext& context) {
  Add(context.counters->requests_submitted, 1);
  Add(context.counters->requests_refused, 1);
}

// Calls that have not ended, for an orderly shutdown. Any thread.
class ActiveCalls {
 public:
  void Enter() {
    std::lock_guard lock(mutex_);
    ++count_;
  }
  void Leave() {
    std::lock_guard lock(mutex_);
    --count_;
    changed_.notify_all();
  }
  // False when calls were still running at the deadline (CLOCK_MONOTONIC).
  bool WaitIdle(uint64_t deadline_ns) {
    const std::chrono::steady_clock::time_point deadline{std::chrono::nanoseconds(deadline_ns)};
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, deadline, [&] { return count_ == 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  size_t count_ = 0;  // guarded by mutex_
};

// The gRPC library owns the calls of On*; the object deletes itself in OnDone. `context`, `writers`
// and `calls` outlive the server.
template <class Response>
class StreamReactor final : public grpc::ServerWriteReactor<Response> {
 public:
  StreamReactor(const ApiContext& context, boost::asio::thread_pool* writers, ActiveCalls* calls)
      : context_(context), calls_(calls), link_(std::make_shared<Link>()) {
    link_->reactor = this;
    link_->writers = writers;
    calls_->Enter();
  }

  // Preparation thread, once: the request has become a stream, or a refusal.
  void Start(StatusOr<Request> request) {
    const std::shared_ptr<Link> link = link_;
    if (!request.ok()) CountRefusal(context_);
    auto submitted = request.ok() ? context_.engine->Submit(std::move(request).value())
                                  : StatusOr<std::shared_ptr<RequestStream>>(request.status());
    std::shared_ptr<RequestStream> stream;
    {
      std::lock_guard guard(link->mutex);
      if (!submitted.ok()) {
        FinishOnce(ToGrpc(submitted.status()));
        return;
      }
      stream = stream_ = std::move(submitted).value();
      if (cancelled_) {
        Stop();
        return;
      }
    }
    // From here on the object may be gone: a cancellation or a short answer can have ended the
    // call.
    stream->SetNotify([link] { Notify(link); });
  }

  void OnWriteDone(bool ok) override {
    const std::shared_ptr<Link> link = link_;
    std::lock_guard guard(link->mutex);
    writing_ = false;
    if (!ok || cancelled_) {
      Stop();
    } else if (last_written_) {
      FinishOnce(grpc::Status::OK);
    } else {
      Pump();
    }
  }

  void OnCancel() override {
    const std::shared_ptr<Link> link = link_;
    std::lock_guard guard(link->mutex);
    Stop();
  }

  void OnDone() override {
    {
      const std::shared_ptr<Link> link = link_;
      std::lock_guard guard(link->mutex);
      link->reactor = nullptr;
      if (stream_) stream_->Cancel();  // no effect on a finished one
      std::lock_guard post_guard(link->post_mutex);
      link->writers = nullptr;
    }
    calls_->Leave();
    delete this;
  }

 private:
  struct Link {
    std::mutex mutex;                             // guards the reactor's members and this pointer:
    StreamReactor* reactor = nullptr;             // null once the reactor is gone
    std::mutex post_mutex;                        // guards the pointer below; never held for long
    boost::asio::thread_pool* writers = nullptr;  // null once the reactor is gone
    std::atomic<bool> posted{false};              // a Pump is on its way
  };

  // Any thread, the engine's loop among them.
  static void Notify(const std::shared_ptr<Link>& link) {
    if (link->posted.exchange(true)) return;
    std::lock_guard post_guard(link->post_mutex);
    if (link->writers == nullptr) return;
    boost::asio::post(*link->writers, [link] {
      link->posted.store(false);  // before the look: an event after it posts again
      std::lock_guard guard(link->mutex);
      if (link->reactor != nullptr) link->reactor->Pump();
    });
  }

  // REQUIRES of all below: link_->mutex held.

  // Writes the next message when none is being written.
  void Pump() {
    while (!writing_ && !finished_ && !cancelled_) {
      if (!Fill()) {
        if (!stream_->TryPop(&event_)) return;
        prompt_sent_ = 0;
        continue;
      }
      writing_ = true;
      this->StartWrite(&response_);
    }
  }

  // The next message of the event at hand; false when nothing of it is left. One event may hold all
  // three kinds, and the report on a prompt is cut into messages of a bounded size.
  bool Fill() {
    response_.Clear();
    if (prompt_sent_ < std::max(event_.prompt_tokens.size(), event_.prompt_argmax.size())) {
      if constexpr (requires { response_.mutable_prompt(); }) {
        prompt_sent_ =
            ToProto(*context_.tokenizer, event_, prompt_sent_, response_.mutable_prompt());
        return true;
      }
    }
    if (!event_.text.empty() || !event_.tokens.empty()) {
      ToProto(*context_.tokenizer, event_, response_.mutable_delta());
      event_.text.clear();
      event_.tokens.clear();
      return true;
    }
    if (event_.finish.has_value()) {
      ToProto(*event_.finish, response_.mutable_finish());
      event_.finish.reset();
      last_written_ = true;
      return true;
    }
    return false;
  }

  // The client is gone: cancel the sequence, end the call.
  void Stop() {
    cancelled_ = true;
    if (!stream_) return;  // Start is still preparing; it comes here
    stream_->Cancel();
    if (!writing_) FinishOnce(grpc::Status(grpc::StatusCode::CANCELLED, "the client went away"));
  }

  void FinishOnce(const grpc::Status& status) {
    if (finished_) return;
    finished_ = true;
    this->Finish(status);
  }

  const ApiContext& context_;
  ActiveCalls* const calls_;
  const std::shared_ptr<Link> link_;
  std::shared_ptr<RequestStream> stream_;
  StreamEvent event_;       // what is left of the event being written
  size_t prompt_sent_ = 0;  // entries of its prompt_tokens
  Response response_;
  bool writing_ = false, finished_ = false, cancelled_ = false, last_written_ = false;
};

}  // namespace lode
