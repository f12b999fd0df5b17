// One connection to a store's server: a request, then its answer. Thread-safe; `close` wakes whoever waits in `ask`.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include "store/message.hpp"

namespace paceline::store {

class Client {
  public:
    using Deadline = std::chrono::steady_clock::time_point;
    using Interrupted = std::function<bool()>;

    // Takes over `fd`, a connected and authenticated stream socket.
    explicit Client(int fd);
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;
    ~Client();

    // lost: the connection ended without the server's goodbye, `closed` with it or by this end.
    enum class Result { answered, closed, timed_out, interrupted, lost };

    // `interrupted` is asked now and then while the answer is awaited. After anything but `answered` the connection
    // is closed: the answer to this request could be taken for the next one's.
    Result ask(const Message& request, Message& answer, Deadline deadline, const Interrupted& interrupted);
    void close();

  private:
    Result exchange(const Message& request, Message& answer, Deadline deadline, const Interrupted& interrupted);
    Result send_all(Deadline deadline, const Interrupted& interrupted);
    Result receive(Message& answer, Deadline deadline, const Interrupted& interrupted);
    Result sleep_until(short events, Deadline deadline, const Interrupted& interrupted);
    bool ends_at(std::size_t used);
    void release();

    std::mutex asking_;
    std::mutex ending_;  // guards fd_ against being closed while `close` shuts it down
    std::atomic<bool> closing_{false};
    int fd_;
    int spins_;  // how often the socket is looked at before sleeping on it: more where that paid
    std::uint32_t asked_ = 0;
    std::string out_, in_;
    bool goodbye_ = false;  // the server's has come, behind an answer
    std::unique_ptr<char[]> buffer_;
};

}  // namespace paceline::store
