// The sockets of a rank of the host, and the requests that are sent over one of them.
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

// A request of one rank to another: for its region `id`, which is kept or not, or to drop a region of the requesting
// rank.
struct Request {
    enum class Kind : std::uint32_t { fetch = 1, keep = 2, forget = 3 };

    HostDirectory::Key key;
    Kind kind;
    std::int32_t from;  // the requesting rank
    RegionId id;
};
static_assert(sizeof(Request) == 48);

constexpr int kGivenUp = ECANCELED;  // as a failure: the region will never exist

// The result of a request for a region; nullptr if there is no such region yet. `failure` is an errno, or 0 if the
// reply was complete and the same request may succeed later.
struct Received {
    std::shared_ptr<Segment> segment;
    int failure = 0;
};

class RegionExchange {
  public:
    // Handles a request; calls `reply` if it is a request for a region.
    using Answer = std::function<void(const Request& request, int connection)>;

    // Opens the sockets; throws std::system_error if the system has no descriptors left.
    RegionExchange();
    RegionExchange(const RegionExchange&) = delete;
    RegionExchange& operator=(const RegionExchange&) = delete;
    ~RegionExchange();

    const SocketName& listener_name() const { return listener_name_; }
    const SocketName& doorbell_name() const { return doorbell_name_; }
    int doorbell() const { return doorbell_; }
    // Rings another rank's doorbell. If the doorbell is full, its rank has already been woken.
    void ring(const SocketName& name) const;

    // Answers requests that have this key, until `stop` is called.
    void serve(const HostDirectory::Key& key, const Answer& answer) const;
    void stop() const;
    // Stops accepting connections. Only closes a descriptor.
    void close_listener();

    // Passes a region's descriptor to the rank that requested it; nullptr means that there is none, because of
    // `failure` or, if that is 0, not yet.
    static void reply(int connection, const Segment* segment, int failure = 0);
    // Sends a request to the rank that listens there, and waits for its reply until `deadline` or until `given_up`
    // returns true; `failure` is then ETIMEDOUT.
    static Received ask(const SocketName& listener, const Request& request,
                        std::chrono::steady_clock::time_point deadline, const std::function<bool()>& given_up);
    // Returns whether a process listens there.
    static bool is_open(const SocketName& listener);
    // Notifies the rank that listens there, without waiting for it.
    static void notify(const SocketName& listener, const Request& request);

  private:
    void close();

    int listener_ = -1;
    int doorbell_ = -1;
    int ringer_ = -1;  // sends rings, which if sent from the doorbell would wake its own waiters
    int stop_ = -1;
    SocketName listener_name_;
    SocketName doorbell_name_;
};

}  // namespace paceline::shm
