// The store's server: one epoll thread that owns the table and all connections. The thread never acquires the
// interpreter lock. `adopt` adds an authenticated connection. A client makes one request at a time: a request that
// waits for a key is parked until the key is set or the request times out, and a client that sends more in the meantime
// is disconnected. The server does not read from a client that does not read its answers, so no connection holds more
// than one request and its answer.
//
// A server with a listener accepts clients of PyTorch's TCPStore, which are not authenticated. Such a server should not
// have any other clients.
#pragma once

#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "store/parked_requests.hpp"
#include "store/torch_wire.hpp"
#include "tls/socket.hpp"

namespace paceline::store {

class Server {
  public:
    // Takes ownership of `listener`, a listening socket for PyTorch's clients, unless it is -1. Throws
    // std::system_error if the system has no descriptors or threads left.
    explicit Server(int listener = -1);
    Server(const Server&) = delete;
    Server& operator=(const Server&) = delete;
    ~Server();

    // Takes ownership of `socket`, a connected stream socket.
    void adopt(tls::Socket socket);
    // Notifies every client that the server is shutting down, closes the connections and stops the thread. Idempotent.
    void close();

  private:
    struct Connection {
        tls::Socket socket;
        std::string in;  // the received part of an incomplete request
        std::string out;
        std::size_t sent = 0;
        bool blocked = false;                      // `out` is waiting for the socket to become writable
        std::map<std::string, std::string> wills;  // the values to set when the connection ends, by key
        std::unique_ptr<TorchReader> torch;        // set for PyTorch clients
        bool is_valid = false;                     // whether a PyTorch client has sent its magic number
        std::size_t parked = 0;                    // size in bytes of the client's waiting query
        std::size_t held = 0;                      // the connection's part of `buffered_bytes_`
    };
    using Connections = std::unordered_map<int, Connection>;

    void serve();
    void adopt_new();
    void accept_new();
    bool receive(Connection& connection);
    bool handle_requests(Connection& connection);
    bool handle_torch(Connection& connection);
    bool handle_barrier(Connection& connection);
    bool has_room(Connection& connection);
    bool flush(Connection& connection);
    void send_answers(const ParkedRequests::Answers& answers);
    void drop(int fd);
    int next_timeout_ms() const;

    int epoll_ = -1;
    int wake_ = -1;
    int listener_ = -1;
    std::size_t max_connections_ = 0;  // maximum number of connections
    std::size_t buffered_bytes_ = 0;   // size in bytes of buffered messages to and from PyTorch's clients
    bool is_paused_ = false;           // accepting is paused because there are too many connections
    std::mutex mutex_;
    std::vector<tls::Socket> new_sockets_;  // guarded by mutex_
    bool closing_ = false;                  // guarded by mutex_
    // Only the server's thread uses the members below.
    Table table_;
    ParkedRequests parked_requests_;
    Connections connections_;
    std::vector<std::string> changed_;
    std::unique_ptr<char[]> buffer_;
    std::mutex join_mutex_;
    std::thread thread_;  // guarded by join_mutex_ once it runs
};

}  // namespace paceline::store
