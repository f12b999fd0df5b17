// A connection to a store's server, for one request at a time. Thread-safe; `close` wakes a thread that waits in `ask`.
#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include "store/message.hpp"
#include "tls/socket.hpp"

namespace paceline::store {

class Client {
  public:
    using Deadline = std::chrono::steady_clock::time_point;
    using Interrupted = std::function<bool()>;

    // Takes ownership of `socket`, a connected and authenticated stream socket.
    explicit Client(tls::Socket socket);
    Client(const Client&) = delete;
    Client& operator=(const Client&) = delete;
    ~Client();

    // `lost`: the connection ended without the server's goodbye. `closed`: it ended with the goodbye or by this side.
    enum class Result { answered, closed, timed_out, interrupted, lost };

    // `interrupted` is called from time to time while `ask` waits for the answer. After any result except `answered`
    // the connection is closed, because a late answer to this request could be mistaken for the answer to the next one.
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
    std::mutex ending_;  // guards the descriptor against being closed while `close` shuts it down
    std::atomic<bool> closing_{false};
    tls::Socket socket_;  // its descriptor is -1 once it is closed
    int spins_;           // the number of polls of the socket before sleeping on it; grows if polling helps
    std::uint32_t asked_ = 0;
    std::string out_, in_;
    bool goodbye_ = false;  // the server's goodbye arrived right after an answer
    std::unique_ptr<char[]> buffer_;
};

}  // namespace paceline::store
