// The store's server: one epoll thread that owns the table and every connection. It never takes the interpreter lock.
//
// `adopt` adds a connection that is already authenticated. A client makes one request at a time: a request that waits
// for a key is parked until the key is set or its time is up, and a client that sends more meanwhile is disconnected.
// The server does not read from a client that does not read its answers, so no connection holds more than one request
// and its answer.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "store/waiters.hpp"
#include "tls/socket.hpp"

namespace paceline::store {

class Server {
  public:
    // Throws std::system_error when the system has no descriptors or threads left.
    Server();
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;
    ~Server();

    // Takes over `socket`, a connected stream socket.
    void adopt(tls::Socket socket);
    // Tells every client that the server is shutting down, closes the connections and ends the thread. Idempotent.
    void close();

  private:
    struct Connection {
        tls::Socket socket;
        std::string in;  // the part of an incomplete request that has arrived
        std::string out;
        std::size_t sent = 0;
        bool blocked = false;                      // `out` waits for room in the socket
        std::map<std::string, std::string> wills;  // keys and values to set when the connection ends
    };
    using Connections = std::unordered_map<int, Connection>;

    void serve();
    void take_new();
    bool receive(Connection& connection);
    bool handle_requests(Connection& connection);
    bool flush(Connection& connection);
    void send_answers(const Waiters::Answers& answers);
    void drop(int fd);
    int next_timeout_ms() const;

    int epoll_ = -1;
    int wake_ = -1;
    std::mutex mutex_;
    std::vector<tls::Socket> fresh_;  // guarded by mutex_
    bool closing_ = false;            // guarded by mutex_
    // Only the server's thread uses the members below.
    Table table_;
    Waiters waiters_;
    Connections connections_;
    std::vector<std::string> changed_;
    std::unique_ptr<char[]> buffer_;
    std::mutex joining_;
    std::thread thread_;  // guarded by joining_ once it runs
};

}  // namespace paceline::store
