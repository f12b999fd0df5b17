#include "shm/host_mesh.hpp"

#include <pthread.h>

#include <algorithm>
#include <cerrno>

#include "call/poll_interval.hpp"
#include "shm/futex.hpp"

namespace paceline::shm {
namespace {

// Time until a wake-up is repeated for threads that were not asleep yet or have not run since.
constexpr std::chrono::milliseconds kFirstRepeat{1};
// If a rank is still running this long after a timeout, its departure is not attributed to the timeout.
constexpr std::chrono::seconds kTimeoutCauseExpiry{30};

}  // namespace

HostMesh::HostMesh(int rank, std::shared_ptr<HostDirectory> directory, std::vector<int> global_ranks)
    : rank_(rank),
      directory_(std::move(directory)),
      global_ranks_(std::move(global_ranks)),
      wait_registry_(
          static_cast<std::size_t>(rank) < global_ranks_.size() ? global_ranks_[static_cast<std::size_t>(rank)] : rank),
      exchange_(directory_->size() > 1 ? std::make_unique<RegionExchange>() : nullptr),
      guard_([this] {
          if (exchange_) exchange_->close_listener();
      }) {
    for (int peer = static_cast<int>(global_ranks_.size()); peer < size(); ++peer) global_ranks_.push_back(peer);
    if (!exchange_) return;
    RankEntry& mine = directory_->entry(rank_);
    mine.listener = exchange_->listener_name();
    mine.doorbell = exchange_->doorbell_name();
    failure_detector_ = std::make_unique<FailureDetector>(directory_, rank_, [this] { handle_departures(); });
    std::promise<void> begun;
    std::future<void> has_begun = begun.get_future();
    server_ = std::thread([this, &begun] { serve(std::move(begun)); });
    has_begun.wait();
    directory_->arrive(rank_);
}

HostMesh::~HostMesh() {
    if (!is_forked_from_member())
        close();
    else if (server_.joinable())
        server_.detach();  // the thread does not exist in a forked child
}

void HostMesh::close() {
    if (forks_ != member_fork_count()) return;  // a forked child: the parent has not left
    {
        const std::lock_guard lock(mutex_);
        if (closed_) return;
        closed_ = true;
    }
    if (exchange_) {
        directory_->entry(rank_).reported_cause.store(reported_cause().pack(), std::memory_order_release);
        directory_->leave(rank_);
        exchange_->stop();
        server_.join();
        failure_detector_->close();
    }
    {
        const std::lock_guard lock(mutex_);
        cache_.clear();
    }
    guard_.close();
}

// The server's thread, which also holds this rank's robust futexes.
void HostMesh::serve(std::promise<void> begun) {
    pthread_setname_np(pthread_self(), "paceline-mesh");
    RobustFutexes futexes(*directory_, rank_);
    futexes.acquire();
    begun.set_value();
    exchange_->serve(directory_->key(),
                     [this](const RegionRequest& request, int connection) { answer(request, connection); });
    futexes.release();
}

void HostMesh::answer(const RegionRequest& request, int connection) {
    const std::lock_guard lock(mutex_);
    if (request.kind == RegionRequest::Kind::evict) {
        cache_.erase({request.from, request.id});
        return;
    }
    const auto found = offers_.find(request.id);
    if (found == offers_.end())
        return RegionExchange::reply(connection, nullptr, canceled_.contains(request.id) ? kCanceled : 0);
    if (request.kind == RegionRequest::Kind::cache) found->second.cached_by.insert(request.from);
    RegionExchange::reply(connection, found->second.segment.get());
}

void HostMesh::handle_departures() {
    changes_.notify();
    exchange_->ring(exchange_->doorbell_name());
    for (auto pause = kFirstRepeat; changes_.repeat_wakeups(); pause = std::min(2 * pause, kPollInterval))
        std::this_thread::sleep_for(pause);
}

FailureCause HostMesh::cause_reported_by(int rank) const {
    const RankEntry& entry = directory_->entry(rank);
    const FailureCause cause = FailureCause::unpack(entry.reported_cause.load(std::memory_order_acquire));
    // Timeouts count only if the rank has left, because otherwise the timeout may have occurred long ago (see
    // `reported_cause`).
    return cause.hung && entry.state.load(std::memory_order_acquire) != RankState::left ? FailureCause{} : cause;
}

FailureCause HostMesh::reported_cause() const {
    const FailureCause cause =
        FailureCause::unpack(directory_->entry(rank_).reported_cause.load(std::memory_order_acquire));
    const Deadline::duration since{cause_reported_at_.load(std::memory_order_relaxed)};
    return cause.hung && Deadline::clock::now().time_since_epoch() - since > kTimeoutCauseExpiry ? FailureCause{}
                                                                                                 : cause;
}

void HostMesh::report_cause(const FailureCause& cause) {
    cause_reported_at_.store(Deadline::clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    directory_->entry(rank_).reported_cause.store(cause.pack(), std::memory_order_release);
}

void HostMesh::offer(RegionId id, std::shared_ptr<Segment> segment) {
    {
        const std::lock_guard lock(mutex_);
        offers_.insert_or_assign(id, Offer{std::move(segment), {}});
    }
    announce_offers();
}

void HostMesh::announce_offers() {
    std::atomic<std::uint32_t>& offers = directory_->entry(rank_).offers;
    offers.fetch_add(1, std::memory_order_release);
    futex_wake_all(offers);
}

std::shared_ptr<Segment> HostMesh::withdraw(RegionId id) {
    if (forks_ != member_fork_count()) return nullptr;  // a forked child: the parent still uses the region
    Offer ended;
    {
        const std::lock_guard lock(mutex_);
        const auto found = offers_.find(id);
        if (found == offers_.end()) return nullptr;
        ended = std::move(found->second);
        offers_.erase(found);
    }
    for (const int holder : ended.cached_by)
        if (holder >= 0 && holder < size() && !is_gone(holder))
            RegionExchange::notify(directory_->entry(holder).listener,
                                   {directory_->key(), RegionRequest::Kind::evict, rank_, id});
    return std::move(ended.segment);
}

void HostMesh::cancel(RegionId id) {
    if (forks_ != member_fork_count()) return;
    {
        const std::lock_guard lock(mutex_);
        canceled_.insert(id);
    }
    withdraw(id);
    announce_offers();
}

FetchResult HostMesh::region(int owner, RegionId id, Deadline deadline) {
    const std::pair key{owner, id};
    {
        const std::lock_guard lock(mutex_);
        if (const auto known = cache_.find(key); known != cache_.end()) return {known->second, 0};
    }
    FetchResult found = get(RegionRequest::Kind::cache, owner, id, deadline);
    if (!found.segment) return found;
    const std::lock_guard lock(mutex_);
    cache_.insert_or_assign(key, found.segment);
    return found;
}

FetchResult HostMesh::get(RegionRequest::Kind kind, int owner, RegionId id, Deadline deadline) {
    const RankEntry& entry = directory_->entry(owner);
    for (;;) {
        const std::uint32_t offers = entry.offers.load(std::memory_order_acquire);
        const RankState state = state_of(owner);
        if (shm::is_gone(state)) return {};
        if (state == RankState::present) {
            const RegionRequest request{directory_->key(), kind, rank_, id};
            RegionReply received =
                RegionExchange::request_region(entry.listener, request, deadline, [&] { return is_gone(owner); });
            if (received.segment) {
                received.segment->close_descriptor();  // this rank passes the memory to no other rank
                return {std::move(received.segment), 0};
            }
            if (received.failure == kCanceled) return {};
            if (received.failure != 0 && received.failure != ETIMEDOUT) return {nullptr, received.failure};
        }
        const auto left = deadline - std::chrono::steady_clock::now();
        if (left <= left.zero()) return {};
        futex_wait(entry.offers, offers,
                   std::chrono::nanoseconds(std::min<decltype(left)>(left, kPollInterval)).count());
    }
}

}  // namespace paceline::shm
