// A connection to a store server; handles one request at a time. Thread-safe. `close` wakes a thread that is waiting in
// `call`.
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

    // `closed`: the server sent its goodbye, or this client closed the connection. `lost`: the connection ended without
    // a goodbye.
    enum class Result { answered, closed, timed_out, interrupted, lost };

    // Sends a request and waits for the answer; calls `interrupted` periodically. After any result except `answered`
    // the connection is closed, because a late answer could be mistaken for the answer to the next request.
    Result call(const Message& request, Message& answer, Deadline deadline, const Interrupted& interrupted);
    void close();

  private:
    Result exchange(const Message& request, Message& answer, Deadline deadline, const Interrupted& interrupted);
    Result send_all(Deadline deadline, const Interrupted& interrupted);
    Result receive(Message& answer, Deadline deadline, const Interrupted& interrupted);
    Result sleep_until(short events, Deadline deadline, const Interrupted& interrupted);
    bool ends_at(std::size_t used);
    void release();

    std::mutex request_mutex_;
    std::mutex close_mutex_;  // prevents the descriptor from being closed while `close` shuts it down
    std::atomic<bool> closing_{false};
    tls::Socket socket_;  // the descriptor is -1 after closing
    int spins_;           // number of polls before sleeping; increases if polling succeeds
    std::uint32_t asked_ = 0;
    std::string out_, in_;
    bool goodbye_ = false;  // the server's goodbye arrived together with an answer
    std::unique_ptr<char[]> buffer_;
};

}  // namespace paceline::store
