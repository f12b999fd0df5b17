// The store's server: one epoll thread that owns the table and every connection. It never takes the interpreter lock.
//
// Connections come in by `adopt`, already authenticated. Requests that wait for a key are parked here and answered
// when the key comes or their time is over.
#pragma once

#include <array>
#include <chrono>
#include <list>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "store/table.hpp"

namespace paceline::store {

class Server {
  public:
    Server();
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;
    ~Server();

    // Takes over `fd`, a connected stream socket.
    void adopt(int fd);
    // Closes every connection and ends the thread. Idempotent.
    void close();

  private:
    using Clock = std::chrono::steady_clock;

    struct Connection {
        std::string in, out;
        std::size_t consumed = 0;
        std::size_t sent = 0;
        bool blocked = false;  // `out` waits for room in the socket
        bool parked = false;   // its request waits; a client asks one thing at a time
    };
    struct Parked {
        int fd;
        Message request;
        Clock::time_point deadline;
    };

    void serve();
    void take_new();
    void receive(int fd);
    void handle_requests(int fd, Connection& connection);
    void answer(Connection& connection, const Message& message);
    void wake_parked();
    void expire_parked();
    void flush(int fd, Connection& connection);
    void drop(int fd);
    int next_timeout_ms() const;

    int epoll_;
    int wake_;
    std::mutex mutex_;
    std::vector<int> fresh_;  // guarded by mutex_
    bool closing_ = false;    // guarded by mutex_
    Table table_;
    std::unordered_map<int, Connection> connections_;
    std::list<Parked> parked_;
    std::vector<std::string> changed_;
    std::array<char, 64 << 10> buffer_;
    std::thread thread_;
};

}  // namespace paceline::store
