// A collective call that is checked once and executed many times.
#pragma once

#include <functional>
#include <memory>

#include "bindings/calls.hpp"

namespace paceline::bindings {

class PreparedCall {
  public:
    // `queue` is the queue of the call's group. The group may be closed while prepared calls exist. If `is_on_one_host`
    // is true, small calls may complete without releasing the interpreter lock. `complete`, if not empty, runs before
    // each call and sets the fields that change between calls.
    PreparedCall(const std::shared_ptr<CallQueue>& queue, Call call, bool is_on_one_host,
                 std::function<void(Call&)> complete = nullptr)
        : queue_(queue),
          call_(std::move(call)),
          may_complete_at_once_(is_on_one_host && is_small(call_)),
          complete_(std::move(complete)) {}

    // Runs the call on this thread; returns None on success. Throws nb::value_error if another thread is running the
    // same call or the group is closed.
    nanobind::object run(std::int64_t timeout_ns);
    // Queues the call after earlier calls.
    std::shared_ptr<Work> submit(std::int64_t timeout_ns);

  private:
    std::shared_ptr<CallQueue> begin(std::int64_t timeout_ns);

    std::weak_ptr<CallQueue> queue_;
    Call call_;
    bool may_complete_at_once_;
    std::function<void(Call&)> complete_;
    bool is_running_ = false;  // guarded by the interpreter lock
};

}  // namespace paceline::bindings
