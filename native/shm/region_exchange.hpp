// The sockets that the ranks on a host use to wake each other and to exchange memory regions.
#pragma once

#include <array>
#include <cerrno>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>

#include "shm/host_directory.hpp"
#include "shm/segment.hpp"

namespace paceline::shm {

using RegionId = std::uint64_t;
using SocketName = std::array<char, kNameBytes>;

// A request from one rank to another. `fetch` requests a region for a single use, and `cache` requests a region to be
// cached. `evict` asks the receiver to drop a cached region that belongs to the sender.
struct RegionRequest {
    enum class Kind : std::uint32_t { fetch = 1, cache = 2, evict = 3 };

    HostDirectory::Key key;
    Kind kind;
    std::int32_t from;  // the requesting rank
    RegionId id;
};
static_assert(sizeof(RegionRequest) == 48);

constexpr int kCanceled = ECANCELED;  // a value of `failure`: the region will never exist

// The result of a request for a region. `segment` is nullptr if there is no such region; `failure` is then an errno, or
// 0 if the same request may succeed later.
struct RegionReply {
    std::shared_ptr<Segment> segment;
    int failure = 0;
};

class RegionExchange {
  public:
    // Handles a request; calls `reply` if it is a request for a region.
    using RequestHandler = std::function<void(const RegionRequest& request, int connection)>;

    // Opens the sockets; throws std::system_error if the system has no descriptors left.
    RegionExchange();
    RegionExchange(const RegionExchange&) = delete;
    RegionExchange& operator=(const RegionExchange&) = delete;
    ~RegionExchange();

    const SocketName& listener_name() const { return listener_name_; }
    const SocketName& doorbell_name() const { return doorbell_name_; }
    int doorbell() const { return doorbell_; }
    // Rings another rank's doorbell. If the doorbell's buffer is full, a wakeup is already pending for that rank.
    void ring(const SocketName& name) const;

    // Answers requests that contain this key, until `stop` is called.
    void serve(const HostDirectory::Key& key, const RequestHandler& handler) const;
    void stop() const;
    // Stops accepting connections. Safe in a forked child, because it only closes a descriptor.
    void close_listener();

    // Sends a region's descriptor to the rank that requested it. A null `segment` means that the region does not exist:
    // `failure` is then an errno, or 0 if the region may exist later.
    static void reply(int connection, const Segment* segment, int failure = 0);
    // Sends a request to the rank with this listener and waits for the reply. Fails with ETIMEDOUT at `deadline`, or as
    // soon as `is_canceled` returns true.
    static RegionReply request_region(const SocketName& listener, const RegionRequest& request,
                                      std::chrono::steady_clock::time_point deadline,
                                      const std::function<bool()>& is_canceled);
    // Returns true if a process is listening on this socket.
    static bool is_open(const SocketName& listener);
    // Sends a request without waiting for a reply.
    static void notify(const SocketName& listener, const RegionRequest& request);

  private:
    void close();

    int listener_ = -1;
    int doorbell_ = -1;
    int ring_socket_ = -1;  // sends rings; sending them from the doorbell would wake this rank's own waiters
    int stop_ = -1;
    SocketName listener_name_;
    SocketName doorbell_name_;
};

}  // namespace paceline::shm
