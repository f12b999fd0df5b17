#include "executor/messenger.hpp"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <utility>

namespace paceline::executor {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::size_t kEagerBytes = 16 << 10;
constexpr std::size_t kEagerWindow = 512 << 10;
constexpr std::size_t kPartBytes = 1 << 20;

// What a small message takes of the window: empty ones are not free for who keeps them.
std::size_t charge(std::size_t nbytes) {
    return nbytes + sizeof(Frame);
}

constexpr auto kSpin = std::chrono::microseconds(50);
constexpr int kSliceMs = 20;
constexpr int kSlicesPerInterruptCheck = 5;
constexpr auto kFarewell = std::chrono::milliseconds(500);

Outcome lost_outcome(int peer, bool left) {
    Outcome outcome;
    outcome.code = Code::peer_lost;
    outcome.missing = outcome.gone = {peer};
    if (left) outcome.left = {peer};
    return outcome;
}

}  // namespace

Messenger::Messenger(link::Links& links) : links_(links), states_(static_cast<std::size_t>(links.size())) {
    links_.watch_control(waiter_);
}

void Messenger::close() {
    std::unique_lock hold(mutex_);
    if (closing_) return;
    closing_ = true;
    changed_.notify_all();
    waiter_.wake();
    if (thread_.joinable()) {
        hold.unlock();
        thread_.join();
        hold.lock();
    }
    if (!open_.empty() && !failure_) {
        Outcome outcome;
        outcome.code = Code::interrupted;
        break_group(std::move(outcome), true);
    }
    for (int peer = 0; peer < links_.size(); ++peer)
        if (links_.peer(peer).control) push(peer, {.kind = FrameKind::goodbye}, {}, nullptr);
    const auto until = Clock::now() + kFarewell;
    const auto pending = [&] {
        return std::any_of(states_.begin(), states_.end(),
                           [](const PeerState& s) { return !s.outgoing.empty() && !s.deaf; });
    };
    while (pending() && Clock::now() < until) {
        if (!progress()) waiter_.sleep(1);
    }
    for (int peer = 0; peer < links_.size(); ++peer) {
        if (links_.peer(peer).control) links_.peer(peer).control->finish();
        for (const auto& lane : links_.peer(peer).bulk) lane->finish();
    }
}

std::shared_ptr<Request> Messenger::send(int peer, std::int32_t tag, DType dtype, const Stream& tensor,
                                         std::int64_t timeout_ns) {
    auto request = std::make_shared<Request>();
    request->peer_ = peer;
    request->tag_ = tag;
    request->dtype_ = dtype;
    request->memory_.append(tensor);
    const std::lock_guard hold(mutex_);
    open(request, timeout_ns);
    PeerState& to = state(peer);
    if (failure_) {
        finish(request, *failure_);
    } else if (to.left || to.lost) {
        finish(request, lost_outcome(peer, to.left));
    } else {
        const std::size_t nbytes = request->memory_.nbytes();
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

std::shared_ptr<Request> Messenger::receive(int peer, std::int32_t tag, DType dtype, const Stream& tensor,
                                            std::int64_t timeout_ns) {
    auto request = std::make_shared<Request>();
    request->receiving_ = true;
    request->peer_ = peer;
    request->tag_ = tag;
    request->dtype_ = dtype;
    request->memory_.append(tensor);
    const std::lock_guard hold(mutex_);
    open(request, timeout_ns);
    if (failure_) {
        finish(request, *failure_);
        return request;
    }
    for (auto it = arrivals_.begin(); it != arrivals_.end(); ++it) {
        if (it->frame.tag != tag || (peer != kAnySource && it->peer != peer)) continue;
        Arrival arrival = std::move(*it);
        arrivals_.erase(it);
        take(arrival, request);
        return request;
    }
    if (peer != kAnySource && (state(peer).left || state(peer).lost)) {
        finish(request, lost_outcome(peer, state(peer).left));
        return request;
    }
    posted_.push_back(request);
    return request;
}

void Messenger::open(const std::shared_ptr<Request>& request, std::int64_t timeout_ns) {
    request->started_ = Clock::now();
    request->deadline_ = request->started_ + std::chrono::nanoseconds(timeout_ns);
    request->place_ = open_.insert(open_.end(), request);
}

// A message that came before its receive was made.
void Messenger::take(Arrival& arrival, const std::shared_ptr<Request>& request) {
    const Frame& frame = arrival.frame;
    if (frame.kind == FrameKind::offer) {
        accept(arrival.peer, frame, request);
        return;
    }
    credit(arrival.peer, frame.nbytes);
    if (!fits(frame, arrival.peer, request)) return;
    for (std::size_t at = 0; at < arrival.bytes.size();) {
        const Piece piece = request->memory_.run(at, arrival.bytes.size() - at);
        std::memcpy(piece.data, arrival.bytes.data() + at, piece.nbytes);
        at += piece.nbytes;
    }
    finish(request, {});
}

void Messenger::accept(int peer, const Frame& offer, const std::shared_ptr<Request>& request) {
    request->source_ = peer;
    Frame answer = offer;
    if (!fits(offer, peer, request)) {
        answer.kind = FrameKind::refuse;
        answer.dtype = request->dtype_;
        answer.offset = request->memory_.nbytes();
        push(peer, answer, {}, nullptr);
    } else if (offer.nbytes == 0) {
        answer.kind = FrameKind::accept;
        push(peer, answer, {}, nullptr);
        finish(request, {});
    } else {
        answer.kind = FrameKind::accept;
        state(peer).accepted[offer.id] = request;
        state(peer).still[offer.id] = offer.nbytes;
        push(peer, answer, {}, nullptr);
    }
    flush(peer);
}

// Whether the message is what the receive expects; if not, both ends are told.
bool Messenger::fits(const Frame& frame, int peer, const std::shared_ptr<Request>& request) {
    request->source_ = peer;
    if (frame.nbytes == request->memory_.nbytes() && frame.dtype == request->dtype_) return true;
    Outcome outcome;
    outcome.code = Code::mismatch;
    outcome.split_from = peer;
    outcome.split_to = links_.rank();
    outcome.split_sent = frame.nbytes;
    outcome.split_expected = request->memory_.nbytes();
    outcome.calls.resize(2);
    outcome.calls[0].dtype = frame.dtype;
    outcome.calls[1].dtype = request->dtype_;
    finish(request, std::move(outcome));
    return false;
}

void Messenger::credit(int peer, std::size_t nbytes) {
    PeerState& from = state(peer);
    from.eager_in += charge(nbytes);
    if (from.eager_in < kEagerWindow / 2) return;
    from.eager_held -= from.eager_in;
    push(peer, {.kind = FrameKind::credit, .nbytes = from.eager_in}, {}, nullptr);
    from.eager_in = 0;
    flush(peer);
}

void Messenger::push(int peer, Frame frame, std::vector<std::uint8_t> own, std::shared_ptr<Request> request) {
    PeerState& to = state(peer);
    if (to.lost || to.left) return;
    to.outgoing.push_back({frame, std::move(own), std::move(request), 0});
}

void Messenger::finish(const std::shared_ptr<Request>& request, Outcome outcome) {
    if (request->done()) return;
    open_.erase(request->place_);
    request->outcome_ = std::move(outcome);
    request->done_.store(true, std::memory_order_release);
    changed_.notify_all();
}

// Writes what waits for `peer`; true when anything moved.
bool Messenger::flush(int peer) {
    PeerState& to = state(peer);
    bool moved = false;
    while (!to.outgoing.empty() && !to.deaf) {
        Outgoing& next = to.outgoing.front();
        const bool in_parts = next.frame.kind == FrameKind::data;
        const std::size_t body = in_parts ? next.frame.part : next.request ? next.frame.nbytes : next.own.size();
        std::array<Piece, link::kMostPieces> pieces;
        std::size_t used = 0;
        const std::size_t head = sizeof(Frame);
        if (next.sent < head)
            pieces[used++] = {reinterpret_cast<std::uint8_t*>(&next.frame) + next.sent, head - next.sent};
        const std::size_t at = next.sent < head ? 0 : next.sent - head;
        if (at < body) {
            if (next.request)
                used += next.request->memory_.slice(next.frame.offset + at, body - at, pieces.data() + used,
                                                    pieces.size() - used);
            else
                pieces[used++] = {next.own.data() + at, body - at};
        }
        const std::ptrdiff_t n = links_.peer(peer).control->write({pieces.data(), used});
        if (n == link::kClosed) {
            // What it sent before it went is still to be read, and tells why it went.
            to.deaf = true;
            return true;
        }
        if (n == 0) return moved;
        moved = true;
        next.sent += static_cast<std::size_t>(n);
        if (next.sent < head + body) continue;
        Outgoing over = std::move(next);
        to.outgoing.pop_front();
        if (!over.request) continue;
        const std::size_t sent = over.frame.offset + over.frame.part;
        if (in_parts && sent < over.frame.nbytes) {
            over.frame.offset = sent;
            over.frame.part = static_cast<std::uint32_t>(std::min(kPartBytes, over.frame.nbytes - sent));
            over.sent = 0;
            to.outgoing.push_back(std::move(over));
        } else {
            finish(over.request, {});
        }
    }
    return moved;
}

// Reads what came from `peer`; true when anything moved.
bool Messenger::receive_from(int peer) {
    PeerState& from = state(peer);
    link::Lane& lane = *links_.peer(peer).control;
    bool moved = false;
    for (;;) {
        // After a failure the tensors are their owners' again.
        if (from.left || from.lost || failure_) return moved;
        std::array<Piece, link::kMostPieces> pieces;
        std::size_t used = 0;
        const std::size_t body = from.frame_read < sizeof(Frame)      ? 0
                                 : from.frame.kind == FrameKind::data ? from.frame.part
                                 : from.frame.kind == FrameKind::eager || from.frame.kind == FrameKind::waiting ||
                                         from.frame.kind == FrameKind::verdict
                                     ? from.frame.nbytes
                                     : 0;
        if (from.frame_read < sizeof(Frame)) {
            pieces[used++] = {reinterpret_cast<std::uint8_t*>(&from.frame) + from.frame_read,
                              sizeof(Frame) - from.frame_read};
        } else if (from.body_read < body) {
            if (from.body_for)
                used = from.body_for->memory_.slice(from.frame.offset + from.body_read, body - from.body_read,
                                                    pieces.data(), pieces.size());
            else
                pieces[used++] = {from.body.data() + from.body_read, body - from.body_read};
        } else {
            end_body(peer);
            from.frame_read = from.body_read = 0;
            from.body_for = nullptr;
            from.body.clear();
            continue;
        }
        const std::ptrdiff_t n = lane.read({pieces.data(), used});
        if (n == link::kClosed) {
            closed(peer);
            return true;
        }
        if (n == 0) return moved;
        moved = true;
        if (from.frame_read < sizeof(Frame)) {
            from.frame_read += static_cast<std::size_t>(n);
            if (from.frame_read == sizeof(Frame) && !begin_body(peer)) {
                closed(peer);
                return true;
            }
        } else {
            from.body_read += static_cast<std::size_t>(n);
        }
    }
}

// Finds where the body of the frame that has come belongs; false when the frame makes no sense.
bool Messenger::begin_body(int peer) {
    PeerState& from = state(peer);
    Frame& frame = from.frame;
    if (!is_sound(frame)) return false;
    switch (frame.kind) {
        case FrameKind::eager: {
            if (frame.nbytes > kEagerBytes || !is_next(peer)) return false;
            from.eager_held += charge(frame.nbytes);
            if (from.eager_held > kEagerWindow) return false;
            frame.offset = 0;
            if (!match_posted(peer)) from.body.resize(frame.nbytes);
            return true;
        }
        case FrameKind::data: {
            const auto found = from.accepted.find(frame.id);
            if (found == from.accepted.end() || frame.part == 0 || frame.part > kPartBytes) return false;
            const std::size_t size = found->second->memory_.nbytes();
            if (frame.offset > size || frame.part > size - frame.offset || frame.part > from.still[frame.id])
                return false;
            from.body_for = found->second;
            return true;
        }
        case FrameKind::waiting:
        case FrameKind::verdict:
            from.body.resize(frame.nbytes);
            return true;
        case FrameKind::offer:
            return is_next(peer);
        default:
            return true;
    }
}

// Whether the message that has come is a new one: their numbers rise.
bool Messenger::is_next(int peer) {
    PeerState& from = state(peer);
    if (from.frame.id <= from.latest_id) return false;
    from.latest_id = from.frame.id;
    return true;
}

// Whether an eager message's receive is there already and takes its bytes straight.
bool Messenger::match_posted(int peer) {
    PeerState& from = state(peer);
    for (auto it = posted_.begin(); it != posted_.end(); ++it) {
        const std::shared_ptr<Request> request = *it;
        if (request->tag_ != from.frame.tag || (request->peer_ != kAnySource && request->peer_ != peer)) continue;
        if (from.frame.kind == FrameKind::offer) {
            posted_.erase(it);
            accept(peer, from.frame, request);
            return true;
        }
        posted_.erase(it);
        if (!fits(from.frame, peer, request)) {
            from.body_for = nullptr;
            from.frame.id = 0;  // its bytes belong to nobody
            return false;
        }
        from.body_for = request;
        return true;
    }
    return false;
}

void Messenger::end_body(int peer) {
    PeerState& from = state(peer);
    const Frame& frame = from.frame;
    switch (frame.kind) {
        case FrameKind::eager:
            if (from.body_for) {
                finish(from.body_for, {});
                credit(peer, frame.nbytes);
            } else if (frame.id != 0) {
                arrivals_.push_back({frame, peer, std::move(from.body)});
            } else {
                credit(peer, frame.nbytes);
            }
            return;
        case FrameKind::offer:
            if (!match_posted(peer)) arrivals_.push_back({frame, peer, {}});
            return;
        case FrameKind::accept:
            if (auto node = from.offered.extract(frame.id); !node.empty()) {
                const std::size_t nbytes = node.mapped()->memory_.nbytes();
                if (nbytes == 0) {
                    finish(node.mapped(), {});
                    return;
                }
                push(peer,
                     {.kind = FrameKind::data,
                      .id = frame.id,
                      .nbytes = nbytes,
                      .part = static_cast<std::uint32_t>(std::min(kPartBytes, nbytes))},
                     {}, node.mapped());
                flush(peer);
            }
            return;
        case FrameKind::data:
            if ((from.still[frame.id] -= frame.part) == 0) {
                from.still.erase(frame.id);
                from.accepted.erase(frame.id);
                finish(from.body_for, {});
            }
            return;
        case FrameKind::refuse:
            if (auto node = from.offered.extract(frame.id); !node.empty()) {
                Outcome outcome;
                outcome.code = Code::mismatch;
                outcome.split_from = links_.rank();
                outcome.split_to = peer;
                outcome.split_sent = node.mapped()->memory_.nbytes();
                outcome.split_expected = frame.offset;
                outcome.calls.resize(2);
                outcome.calls[0].dtype = node.mapped()->dtype_;
                outcome.calls[1].dtype = frame.dtype;
                finish(node.mapped(), std::move(outcome));
            }
            return;
        case FrameKind::credit:
            from.eager_out -= std::min<std::size_t>(from.eager_out, frame.nbytes);
            return;
        case FrameKind::waiting: {
            CallHeader header;
            std::memcpy(&header, from.body.data(), sizeof header);
            if (is_sound(header)) from.announced = header;
            return;
        }
        case FrameKind::verdict:
            if (auto outcome = decode(from.body, links_.size()); !outcome || outcome->reporter != peer)
                closed(peer);
            else if (!failure_)
                break_group(std::move(*outcome), false);
            return;
        case FrameKind::goodbye:
            from.left = true;
            closed(peer);
            return;
    }
}

// The peer died, broke the rules, or said goodbye.
void Messenger::closed(int peer) {
    PeerState& from = state(peer);
    const std::deque<Outgoing> unsent = std::exchange(from.outgoing, {});
    if (!from.left) {
        if (from.lost) return;
        from.lost = true;
        if (!failure_) break_group(lost_outcome(peer, false), true);
        return;
    }
    const auto end = [&](const std::shared_ptr<Request>& request) { finish(request, lost_outcome(peer, true)); };
    for (const Outgoing& each : unsent)
        if (each.request) end(each.request);
    for (auto& [id, request] : from.offered) end(request);
    for (auto& [id, request] : from.accepted) end(request);
    from.offered.clear();
    from.accepted.clear();
    from.still.clear();
    const bool alone = std::all_of(states_.begin(), states_.end(), [&](const PeerState& each) {
        return each.left || each.lost || &each == &states_[static_cast<std::size_t>(links_.rank())];
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

// Makes a frame independent of its request's tensor.
void Messenger::copy_body(Outgoing& outgoing) {
    if (!outgoing.request) return;
    const bool in_parts = outgoing.frame.kind == FrameKind::data;
    const std::size_t from = in_parts ? outgoing.frame.offset : 0;
    outgoing.own.resize(in_parts ? outgoing.frame.part : outgoing.frame.nbytes);
    for (std::size_t at = 0; at < outgoing.own.size();) {
        const Piece piece = outgoing.request->memory_.run(from + at, outgoing.own.size() - at);
        std::memcpy(outgoing.own.data() + at, piece.data, piece.nbytes);
        at += piece.nbytes;
    }
    outgoing.request = nullptr;
}

void Messenger::break_group(Outcome outcome, bool tell) {
    if (outcome.reporter < 0) outcome.reporter = links_.rank();
    failure_ = outcome;
    failed_.store(true, std::memory_order_release);
    for (PeerState& each : states_) {
        each.offered.clear();
        each.accepted.clear();
        each.still.clear();
        each.body_for = nullptr;
        // What a peer is in the middle of reading must be finished before the verdict; the rest is void.
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
    if (tell) {
        const std::vector<std::uint8_t> bytes = encode(outcome);
        for (int peer = 0; peer < links_.size(); ++peer) {
            if (!links_.peer(peer).control) continue;
            push(peer, {.kind = FrameKind::verdict, .nbytes = bytes.size()}, bytes, nullptr);
            flush(peer);
        }
    }
    changed_.notify_all();
}

bool Messenger::progress() {
    bool moved = false;
    for (int peer = 0; peer < links_.size(); ++peer) {
        PeerState& each = state(peer);
        if (!links_.peer(peer).control || each.lost || each.left) continue;
        if (!each.outgoing.empty()) moved |= flush(peer);
        moved |= receive_from(peer);
    }
    return moved;
}

void Messenger::expire() {
    const auto now = Clock::now();
    for (const std::shared_ptr<Request>& request : open_) {
        if (now > request->deadline_) {
            Outcome outcome;
            outcome.code = Code::timed_out;
            outcome.waited_ns = std::chrono::nanoseconds(now - request->started_).count();
            for (int peer = 0; peer < links_.size(); ++peer)
                if (peer == request->peer_ || (request->peer_ == kAnySource && peer != links_.rank()))
                    outcome.missing.push_back(peer);
            for (const PeerState& each : states_) outcome.calls.push_back(each.announced);
            break_group(std::move(outcome), true);
            return;
        }
        if (request->peer_ != kAnySource && !state(request->peer_).lost &&
            links_.peer(request->peer_).control->silent()) {
            closed(request->peer_);
            return;
        }
    }
}

// What has to be done now and then, also while there is always something to move.
void Messenger::look_around(std::unique_lock<std::mutex>& hold, const std::shared_ptr<Request>& until, int slice,
                            const Interrupted& interrupted) {
    expire();
    if (slice % kSlicesPerInterruptCheck != 0 || !interrupted) return;
    hold.unlock();
    const bool stop = interrupted();
    hold.lock();
    if (!stop || !until || until->done()) return;
    Outcome outcome;
    outcome.code = Code::interrupted;
    if (until->peer_ >= 0) outcome.missing = {until->peer_};
    break_group(std::move(outcome), true);
}

// Drives the lanes until `until` is done or, without it, until there is nothing to do in the background.
void Messenger::drive(std::unique_lock<std::mutex>& hold, const std::shared_ptr<Request>& until,
                      Clock::time_point deadline, const Interrupted& interrupted) {
    driving_ = true;
    auto idle_since = Clock::now();
    auto looked = idle_since;
    int slice = 0;
    for (;;) {
        const bool moved = progress();
        if (until ? until->done() : (open_.empty() || urgent_ > 0 || closing_)) break;
        const auto now = Clock::now();
        if (now > deadline) break;
        if (now - looked >= std::chrono::milliseconds(kSliceMs)) {
            looked = now;
            look_around(hold, until, ++slice, interrupted);
            continue;
        }
        if (moved) {
            idle_since = now;
            continue;
        }
        if (until && now - idle_since < kSpin) {
            hold.unlock();
            sched_yield();
            hold.lock();
            continue;
        }
        bool more = false;
        for (int peer = 0; peer < links_.size(); ++peer)
            if (links_.peer(peer).control && !state(peer).lost && !state(peer).left)
                more |= links_.peer(peer).control->arm();
        if (more) continue;
        hold.unlock();
        waiter_.sleep(kSliceMs);
        hold.lock();
    }
    driving_ = false;
    changed_.notify_all();
}

bool Messenger::wait(const std::shared_ptr<Request>& request, std::int64_t timeout_ns, const Interrupted& interrupted) {
    if (request->done()) return true;
    auto looked = Clock::now();
    const auto most = std::chrono::nanoseconds(Clock::time_point::max() - looked).count();
    const auto deadline = looked + std::chrono::nanoseconds(std::min(timeout_ns, most / 2));
    std::unique_lock hold(mutex_);
    ++urgent_;
    if (driving_) waiter_.wake();
    for (int slice = 0; !request->done() && Clock::now() <= deadline;) {
        if (!driving_) {
            drive(hold, request, deadline, interrupted);
            continue;
        }
        changed_.wait_for(hold, std::chrono::milliseconds(kSliceMs));
        if (Clock::now() - looked < std::chrono::milliseconds(kSliceMs)) continue;
        looked = Clock::now();
        look_around(hold, request, ++slice, interrupted);
    }
    --urgent_;
    changed_.notify_all();
    return request->done();
}

void Messenger::run_in_background() {
    const std::lock_guard hold(mutex_);
    if (!thread_.joinable()) thread_ = std::thread([this] { background(); });
    changed_.notify_all();
}

void Messenger::background() {
    pthread_setname_np(pthread_self(), "paceline-messages");
    std::unique_lock hold(mutex_);
    for (;;) {
        changed_.wait(hold, [this] { return closing_ || (!open_.empty() && !driving_ && urgent_ == 0); });
        if (closing_) return;
        drive(hold, nullptr, Clock::time_point::max(), nullptr);
    }
}

void Messenger::poll() {
    std::unique_lock hold(mutex_, std::try_to_lock);
    if (hold.owns_lock() && !driving_) progress();
}

std::optional<Outcome> Messenger::failure() {
    if (!failed_.load(std::memory_order_acquire)) return std::nullopt;
    const std::lock_guard hold(mutex_);
    return failure_;
}

Outcome Messenger::fail(Outcome outcome) {
    const std::lock_guard hold(mutex_);
    if (!failure_) break_group(std::move(outcome), true);
    return *failure_;
}

void Messenger::announce(const CallHeader& header) {
    const std::lock_guard hold(mutex_);
    state(links_.rank()).announced = header;
    const auto* from = reinterpret_cast<const std::uint8_t*>(&header);
    for (int peer = 0; peer < links_.size(); ++peer) {
        if (!links_.peer(peer).control) continue;
        auto& outgoing = state(peer).outgoing;
        // A peer that computes for long reads nothing: only the latest call waits for it.
        std::erase_if(outgoing, [](const Outgoing& each) {
            return each.frame.kind == FrameKind::waiting && each.sent == 0;
        });
        push(peer, {.kind = FrameKind::waiting, .nbytes = sizeof header}, {from, from + sizeof header}, nullptr);
        flush(peer);
    }
}

std::vector<CallHeader> Messenger::announced() {
    const std::lock_guard hold(mutex_);
    std::vector<CallHeader> headers;
    for (const PeerState& each : states_) headers.push_back(each.announced);
    return headers;
}

std::size_t Messenger::queued(int peer) {
    const std::lock_guard hold(mutex_);
    return state(peer).outgoing.size();
}

std::vector<int> Messenger::left() {
    const std::lock_guard hold(mutex_);
    std::vector<int> ranks;
    for (int peer = 0; peer < links_.size(); ++peer)
        if (state(peer).left) ranks.push_back(peer);
    return ranks;
}

std::vector<int> Messenger::lost() {
    const std::lock_guard hold(mutex_);
    std::vector<int> ranks;
    for (int peer = 0; peer < links_.size(); ++peer)
        if (state(peer).lost) ranks.push_back(peer);
    return ranks;
}

}  // namespace paceline::executor
