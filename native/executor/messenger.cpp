#include "executor/messenger.hpp"

#include <algorithm>
#include <utility>

namespace paceline::executor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr auto kGoodbyeTimeout = std::chrono::milliseconds(500);
// An acknowledgment takes a round trip, plus up to 40 ms if the peer has nothing to send.
constexpr auto kDeliveryTimeout = std::chrono::seconds(2);

}  // namespace

Messenger::Messenger(link::LaneSet& lanes)
    : lanes_(lanes), states_(static_cast<std::size_t>(lanes.size())), received_headers_(states_.size()) {
    lanes_.watch_control(waiter_);
    lanes_.wait_registry().add(*this);
}

void Messenger::close() {
    lanes_.wait_registry().remove(*this);  // acquires `transports_mutex_`, so `mutex_` must not be held
    std::unique_lock lock(mutex_);
    if (closing_) return;
    closing_ = true;
    changed_.notify_all();
    waiter_.wake();
    if (thread_.joinable()) {
        lock.unlock();
        thread_.join();
        lock.lock();
    }
    if (!open_.empty() && !failure_) {
        Outcome outcome;
        outcome.code = OutcomeCode::interrupted;
        break_group(std::move(outcome), true);
    }
    for (int peer = 0; peer < lanes_.size(); ++peer)
        if (lanes_.peer(peer).control)
            push(peer, {.kind = FrameKind::goodbye, .id = lanes_.reported_cause().pack()}, {}, nullptr);
    const auto until = Clock::now() + kGoodbyeTimeout;
    const auto pending = [&] {
        return std::any_of(states_.begin(), states_.end(),
                           [](const PeerState& s) { return !s.outgoing.empty() && !s.is_write_closed; });
    };
    for (bool late = false; pending() && !late;) {  // tries at least once, even after the deadline
        late = Clock::now() >= until;
        if (!progress() && !late) waiter_.sleep(std::chrono::milliseconds(1));
    }
    for (int peer = 0; peer < lanes_.size(); ++peer) {
        if (lanes_.peer(peer).control) lanes_.peer(peer).control->finish();
        for (const auto& lane : lanes_.peer(peer).bulk) lane->finish();
    }
    if (!failure_) await_delivery(lock);
}

// Waits until the peers' machines have received the goodbyes. A peer in its last call may still send an announcement.
// If that frame arrived after this rank closed the lane, the kernel would answer with a reset, which could overtake the
// goodbye and make this rank appear dead.
void Messenger::await_delivery(std::unique_lock<std::mutex>& lock) {
    std::vector<const link::Lane*> awaited;
    for (int peer = 0; peer < lanes_.size(); ++peer) {
        const PeerState& to = state(peer);
        if (lanes_.peer(peer).control && !to.left && !to.lost && !to.is_write_closed)
            awaited.push_back(lanes_.peer(peer).control.get());
    }
    lock.unlock();
    const auto until = Clock::now() + kDeliveryTimeout;
    const auto delivered = [](const link::Lane* lane) { return lane->delivered(); };
    while (!std::all_of(awaited.begin(), awaited.end(), delivered) && Clock::now() < until)
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

std::shared_ptr<Request> Messenger::send(int peer, std::int32_t tag, DType dtype, const ByteStream& tensor,
                                         std::int64_t timeout_ns) {
    auto request = std::make_shared<Request>();
    request->peer_ = peer;
    request->tag_ = tag;
    request->dtype_ = dtype;
    request->tensor_.append(tensor);
    const std::lock_guard lock(mutex_);
    open(request, timeout_ns);
    PeerState& to = state(peer);
    if (failure_) {
        finish(request, *failure_);
    } else if (to.left || to.lost) {
        finish(request, peer_lost_outcome_locked(peer));
    } else if (to.offered.size() >= kMaxOffers) {
        Outcome outcome;
        outcome.code = OutcomeCode::too_many_offers;
        outcome.missing = {peer};
        finish(request, std::move(outcome));
    } else {
        const std::size_t nbytes = request->tensor_.nbytes();
        Frame frame{.kind = FrameKind::offer, .id = to.next_id++, .nbytes = nbytes, .tag = tag, .dtype = dtype};
        if (nbytes <= kEagerBytes && to.eager_out + charge(nbytes) <= kEagerWindow) {
            frame.kind = FrameKind::eager;
            to.eager_out += charge(nbytes);
            push(peer, frame, {}, request);
        } else {
            to.offered[frame.id] = request;
            push(peer, frame, {}, nullptr);
        }
        flush(peer);
    }
    return request;
}

std::shared_ptr<Request> Messenger::receive(int peer, std::int32_t tag, DType dtype, const ByteStream& tensor,
                                            std::int64_t timeout_ns) {
    auto request = std::make_shared<Request>();
    request->receiving_ = true;
    request->peer_ = peer;
    request->tag_ = tag;
    request->dtype_ = dtype;
    request->tensor_.append(tensor);
    const std::lock_guard lock(mutex_);
    open(request, timeout_ns);
    if (failure_) {
        finish(request, *failure_);
        return request;
    }
    for (auto it = unexpected_.begin(); it != unexpected_.end(); ++it) {
        if (!matches_envelope(it->frame, it->peer, *request)) continue;
        UnexpectedMessage message = std::move(*it);
        unexpected_.erase(it);
        complete_with(message, request);
        return request;
    }
    if (peer != kAnySource && (state(peer).left || state(peer).lost)) {
        finish(request, peer_lost_outcome_locked(peer));
        return request;
    }
    posted_.push_back(request);
    return request;
}

void Messenger::open(const std::shared_ptr<Request>& request, std::int64_t timeout_ns) {
    request->started_ = Clock::now();
    request->deadline_ = request->started_ + std::chrono::nanoseconds(timeout_ns);
    request->place_ = open_.insert(open_.end(), request);
    request->recorded_.arrive_message(recorded_as_.load(std::memory_order_relaxed), request->receiving_,
                                      request->dtype_, request->tensor_.nbytes() / item_size(request->dtype_),
                                      request->peer_, request->tag_);
}

Outcome Messenger::peer_lost_outcome(int peer) {
    const std::lock_guard lock(mutex_);
    return peer_lost_outcome_locked(peer);
}

Outcome Messenger::peer_lost_outcome_locked(int peer) {
    const PeerState& from = state(peer);
    Outcome outcome;
    outcome.code = OutcomeCode::peer_lost;
    outcome.missing = outcome.gone = {peer};
    if (from.left) outcome.left = {peer};
    outcome.cause = from.cause.known() ? from.cause : lanes_.cause_reported_by(peer);
    report_cause_of(outcome);
    return outcome;
}

// Reports the cause to the mesh. This rank will soon leave its other groups as well, and the ranks of those groups then
// report this cause.
void Messenger::report_cause_of(const Outcome& outcome) {
    const auto global_rank = [this](int rank) { return lanes_.global_rank(rank); };
    const FailureCause cause = cause_of_leaving(outcome, lanes_.wait_registry().global_rank(), global_rank);
    if (cause.known()) lanes_.report_cause(cause);
}

// Closes the connection to a peer that died, violated the protocol, or sent a goodbye.
void Messenger::handle_close(int peer) {
    PeerState& from = state(peer);
    const std::deque<OutgoingFrame> unsent = std::exchange(from.outgoing, {});
    if (!from.left) {
        if (from.lost) return;
        from.lost = true;
        if (!failure_) break_group(peer_lost_outcome_locked(peer), true);
        return;
    }
    const auto end = [&](const std::shared_ptr<Request>& request) { finish(request, peer_lost_outcome_locked(peer)); };
    for (const OutgoingFrame& each : unsent)
        if (each.request) end(each.request);
    for (auto& [id, request] : from.offered) end(request);
    for (auto& [id, request] : from.accepted) end(request);
    from.offered.clear();
    from.accepted.clear();
    from.remaining.clear();
    const bool alone = std::all_of(states_.begin(), states_.end(), [&](const PeerState& each) {
        return each.left || each.lost || &each == &states_[static_cast<std::size_t>(lanes_.rank())];
    });
    for (auto it = posted_.begin(); it != posted_.end();) {
        if ((*it)->peer_ == peer || (alone && (*it)->peer_ == kAnySource)) {
            end(*it);
            it = posted_.erase(it);
        } else {
            ++it;
        }
    }
}

void Messenger::break_group(Outcome outcome, bool notifies_others) {
    if (outcome.reporter < 0) outcome.reporter = lanes_.rank();
    report_cause_of(outcome);
    failure_ = outcome;
    failed_.store(true, std::memory_order_release);
    for (PeerState& each : states_) {
        each.offered.clear();
        each.accepted.clear();
        each.remaining.clear();
        each.body_for = nullptr;
        // Only a partly sent frame must be completed before the failure report; all other frames are dropped. The
        // remainder of that frame is copied, because the program may reuse the tensors once their requests have failed.
        while (each.outgoing.size() > 1) each.outgoing.pop_back();
        if (each.outgoing.empty()) continue;
        if (each.outgoing.front().sent == 0)
            each.outgoing.clear();
        else
            copy_body(each.outgoing.front());
    }
    posted_.clear();
    const std::list<std::shared_ptr<Request>> ending = open_;
    for (const std::shared_ptr<Request>& request : ending) finish(request, outcome);
    if (notifies_others) {
        const std::vector<std::uint8_t> bytes = encode(outcome);
        for (int peer = 0; peer < lanes_.size(); ++peer) {
            if (!lanes_.peer(peer).control) continue;
            push(peer, {.kind = FrameKind::failure, .nbytes = bytes.size()}, bytes, nullptr);
            flush(peer);
        }
    }
    changed_.notify_all();
    if (failure_waiter_ != nullptr) failure_waiter_->wake();
}

void Messenger::on_failure(link::Waiter* waiter) {
    const std::lock_guard lock(mutex_);
    failure_waiter_ = waiter;
}

std::optional<Outcome> Messenger::failure() {
    if (!failed_.load(std::memory_order_acquire)) return std::nullopt;
    const std::lock_guard lock(mutex_);
    return failure_;
}

Outcome Messenger::fail(Outcome outcome) {
    const std::lock_guard lock(mutex_);
    if (!failure_) break_group(std::move(outcome), true);
    return *failure_;
}

void Messenger::abort() {
    abort_requested_.store(true, std::memory_order_release);
    waiter_.wake();
    // The driving thread may hold the lock for as long as data is moving. In that case, that thread breaks the group.
    const std::lock_guard lock(mutex_);
    handle_abort();
}

void Messenger::handle_abort() {
    if (!abort_requested_.load(std::memory_order_acquire) || failure_ || closing_) return;
    Outcome outcome;
    outcome.code = OutcomeCode::aborted;
    break_group(std::move(outcome), true);
}

void Messenger::announce(const CallHeader& header) {
    const std::lock_guard lock(mutex_);
    state(lanes_.rank()).announced = header;
    const auto* from = reinterpret_cast<const std::uint8_t*>(&header);
    for (int peer = 0; peer < lanes_.size(); ++peer) {
        if (!lanes_.peer(peer).control) continue;
        auto& outgoing = state(peer).outgoing;
        // Only the latest announcement stays queued: a peer that is computing reads no frames, so earlier ones would
        // accumulate.
        std::erase_if(outgoing, [](const OutgoingFrame& each) {
            return each.frame.kind == FrameKind::waiting && each.sent == 0;
        });
        push(peer, {.kind = FrameKind::waiting, .nbytes = sizeof header}, {from, from + sizeof header}, nullptr);
        flush(peer);
    }
}

std::vector<CallHeader> Messenger::announced() {
    const std::lock_guard lock(mutex_);
    std::vector<CallHeader> headers;
    for (const PeerState& each : states_) headers.push_back(each.announced);
    return headers;
}

void Messenger::record_received(int peer, const CallHeader& header) {
    const std::lock_guard lock(headers_mutex_);
    received_headers_[static_cast<std::size_t>(peer)] = header;
}

void Messenger::record_completed(const CallHeader& header) {
    const std::lock_guard lock(headers_mutex_);
    completed_header_ = header;
}

std::vector<CallHeader> Messenger::latest() {
    const std::lock_guard lock(mutex_);
    return latest_locked();
}

std::vector<CallHeader> Messenger::latest_locked() {
    const std::lock_guard lock(headers_mutex_);
    std::vector<CallHeader> headers;
    for (std::size_t r = 0; r < states_.size(); ++r)
        headers.push_back(std::max({states_[r].announced, received_headers_[r], completed_header_},
                                   [](const CallHeader& a, const CallHeader& b) { return a.sequence < b.sequence; }));
    return headers;
}

std::size_t Messenger::queued(int peer) {
    const std::lock_guard lock(mutex_);
    return state(peer).outgoing.size();
}

std::vector<int> Messenger::left() {
    const std::lock_guard lock(mutex_);
    std::vector<int> ranks;
    for (int peer = 0; peer < lanes_.size(); ++peer)
        if (state(peer).left) ranks.push_back(peer);
    return ranks;
}

}  // namespace paceline::executor
