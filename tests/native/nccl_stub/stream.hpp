// The stand-in for a CUDA stream: a thread that runs its jobs in order.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>

namespace stub {

class Stream {
  public:
    Stream() : thread_([this] { run(); }) { thread_.detach(); }

    int64_t give(std::function<void()> job) {
        const std::lock_guard lock(mutex_);
        jobs_.push_back(std::move(job));
        changed_.notify_all();
        return ++given_;
    }

    int64_t given() {
        const std::lock_guard lock(mutex_);
        return given_;
    }

    bool passed(int64_t place) {
        const std::lock_guard lock(mutex_);
        return passed_ >= place;
    }

    void wait(int64_t place) {
        std::unique_lock lock(mutex_);
        changed_.wait(lock, [&] { return passed_ >= place; });
    }

  private:
    void run() {
        std::unique_lock lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return !jobs_.empty(); });
            const auto job = std::move(jobs_.front());
            jobs_.pop_front();
            lock.unlock();
            job();
            lock.lock();
            ++passed_;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> jobs_;
    int64_t given_ = 0, passed_ = 0;
    std::thread thread_;
};

}  // namespace stub
