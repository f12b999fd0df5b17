// Processing of received frames: matches messages with receives and enforces the protocol (see the note in
// messenger.hpp).
#include <algorithm>
#include <cstring>

#include "call/completion_counter.hpp"
#include "executor/messenger.hpp"

namespace paceline::executor {

// Completes `request` with a message that has arrived.
void Messenger::complete_with(UnexpectedMessage& message, const std::shared_ptr<Request>& request) {
    const Frame& frame = message.frame;
    request->source_ = message.peer;
    if (frame.kind == FrameKind::offer) {
        --state(message.peer).offers_held;
        accept(message.peer, frame, request);
        return;
    }
    credit(message.peer, frame.nbytes);
    if (!matches(frame, *request)) return fail_mismatch(frame, message.peer, request);
    for (std::size_t at = 0; at < message.bytes.size();) {
        const ByteRange range = request->tensor_.run(at, message.bytes.size() - at);
        std::memcpy(range.data, message.bytes.data() + at, range.nbytes);
        at += range.nbytes;
    }
    finish(request, {});
}

void Messenger::accept(int peer, const Frame& offer, const std::shared_ptr<Request>& request) {
    Frame answer = offer;
    if (!matches(offer, *request)) {
        fail_mismatch(offer, peer, request);
        answer.kind = FrameKind::refuse;
        answer.dtype = request->dtype_;
        answer.offset = request->tensor_.nbytes();
        push(peer, answer, {}, nullptr);
    } else if (offer.nbytes == 0) {
        answer.kind = FrameKind::accept;
        push(peer, answer, {}, nullptr);
        finish(request, {});
    } else {
        answer.kind = FrameKind::accept;
        state(peer).accepted[offer.id] = request;
        state(peer).remaining[offer.id] = offer.nbytes;
        push(peer, answer, {}, nullptr);
    }
    flush(peer);
}

// Returns true if the message's size and dtype equal those of the receive.
bool Messenger::matches(const Frame& frame, const Request& request) {
    return frame.nbytes == request.tensor_.nbytes() && frame.dtype == request.dtype_;
}

// Fails a receive whose message has a different size or dtype.
void Messenger::fail_mismatch(const Frame& frame, int peer, const std::shared_ptr<Request>& request) {
    Outcome outcome;
    outcome.code = OutcomeCode::mismatch;
    outcome.split_from = peer;
    outcome.split_to = lanes_.rank();
    outcome.split_sent = frame.nbytes;
    outcome.split_expected = request->tensor_.nbytes();
    outcome.calls.resize(2);
    outcome.calls[0].dtype = frame.dtype;
    outcome.calls[1].dtype = request->dtype_;
    finish(request, std::move(outcome));
}

// Counts an eager message as consumed, and sends a credit to its sender once half a window has been consumed.
void Messenger::credit(int peer, std::size_t nbytes) {
    PeerState& from = state(peer);
    from.eager_in += charge(nbytes);
    if (from.eager_in < kEagerWindow / 2) return;
    from.eager_held -= from.eager_in;
    push(peer, {.kind = FrameKind::credit, .nbytes = from.eager_in}, {}, nullptr);
    from.eager_in = 0;
    flush(peer);
}

void Messenger::finish(const std::shared_ptr<Request>& request, Outcome outcome) {
    if (request->done()) return;
    open_.erase(request->place_);
    request->outcome_ = std::move(outcome);
    record_end(*request);
    request->done_.store(true, std::memory_order_release);
    changed_.notify_all();
    CompletionCounter::of_process().announce();
}

void Messenger::record_end(Request& request) {
    CallMetrics metrics;
    if (request.receiving_) {
        metrics.last_arrived = request.source_;
    } else if (request.outcome_.code == OutcomeCode::ok) {
        const bool is_here = lanes_.peer(request.peer_).mesh_rank >= 0;
        (is_here ? metrics.shm_nbytes : metrics.tcp_nbytes) = request.tensor_.nbytes();
    }
    request.recorded_.end(metrics, request.outcome_);
}

// Chooses the memory into which the body of the received frame is read; returns false if the frame violates the
// protocol.
bool Messenger::begin_body(int peer) {
    PeerState& from = state(peer);
    Frame& frame = from.frame;
    if (!is_valid(frame)) return false;
    switch (frame.kind) {
        case FrameKind::eager: {
            if (frame.nbytes > kEagerBytes || !is_next(peer)) return false;
            from.eager_held += charge(frame.nbytes);
            if (from.eager_held > kEagerWindow) return false;
            frame.offset = 0;
            // If the receive has a different size or dtype, or is posted while the body is arriving, it is completed or
            // failed only after the body has been read.
            if (const auto at = posted_for(frame, peer); at != posted_.end() && matches(frame, **at)) {
                from.body_for = *at;
                from.body_for->source_ = peer;
                posted_.erase(at);
            } else {
                from.body.resize(frame.nbytes);
            }
            return true;
        }
        case FrameKind::data: {
            const auto found = from.accepted.find(frame.id);
            if (found == from.accepted.end() || frame.part == 0 || frame.part > kPartBytes) return false;
            const std::size_t size = found->second->tensor_.nbytes();
            if (frame.offset > size || frame.part > size - frame.offset || frame.part > from.remaining[frame.id])
                return false;
            from.body_for = found->second;
            return true;
        }
        case FrameKind::waiting:
        case FrameKind::failure:
        case FrameKind::answer:
            from.body.resize(frame.nbytes);
            return true;
        case FrameKind::offer:
            return is_next(peer) && from.offers_held < kMaxOffers;
        default:
            return true;
    }
}

// Returns true if the message's id is greater than all earlier ids from this peer.
bool Messenger::is_next(int peer) {
    PeerState& from = state(peer);
    if (from.frame.id <= from.latest_id) return false;
    from.latest_id = from.frame.id;
    return true;
}

// Returns true if the receive matches this message from `peer`.
bool Messenger::matches_envelope(const Frame& frame, int peer, const Request& request) {
    return request.tag_ == frame.tag && (request.peer_ == kAnySource || request.peer_ == peer);
}

// Returns the oldest posted receive that matches this message from `peer`, or the end of the list.
std::list<std::shared_ptr<Request>>::iterator Messenger::posted_for(const Frame& frame, int peer) {
    return std::find_if(posted_.begin(), posted_.end(),
                        [&](const std::shared_ptr<Request>& each) { return matches_envelope(frame, peer, *each); });
}

// Completes the posted receive that matches a message, or stores the message until such a receive is posted.
void Messenger::arrive(UnexpectedMessage message) {
    PeerState& from = state(message.peer);
    if (message.frame.kind == FrameKind::offer) ++from.offers_held;
    const auto at = posted_for(message.frame, message.peer);
    if (at == posted_.end()) {
        unexpected_.push_back(std::move(message));
        return;
    }
    const std::shared_ptr<Request> request = *at;
    posted_.erase(at);
    complete_with(message, request);
}

void Messenger::end_body(int peer) {
    PeerState& from = state(peer);
    const Frame& frame = from.frame;
    switch (frame.kind) {
        case FrameKind::eager:
            if (from.body_for) {
                finish(from.body_for, {});
                credit(peer, frame.nbytes);
            } else {
                arrive({frame, peer, std::move(from.body)});
            }
            return;
        case FrameKind::offer:
            arrive({frame, peer, {}});
            return;
        case FrameKind::accept:
            if (auto node = from.offered.extract(frame.id); !node.empty()) {
                const std::size_t nbytes = node.mapped()->tensor_.nbytes();
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
            if ((from.remaining[frame.id] -= frame.part) == 0) {
                from.remaining.erase(frame.id);
                from.accepted.erase(frame.id);
                finish(from.body_for, {});
            }
            return;
        case FrameKind::refuse:
            if (auto node = from.offered.extract(frame.id); !node.empty()) {
                Outcome outcome;
                outcome.code = OutcomeCode::mismatch;
                outcome.split_from = lanes_.rank();
                outcome.split_to = peer;
                outcome.split_sent = node.mapped()->tensor_.nbytes();
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
            if (is_valid(header)) from.announced = header;
            return;
        }
        case FrameKind::failure:
            // The failure report is forwarded to all ranks, because each of them must have the reason before it detects
            // that this rank has left.
            if (auto outcome = decode(from.body, lanes_.size()); !outcome)
                handle_close(peer);
            else if (!failure_)
                break_group(std::move(*outcome), true);
            return;
        case FrameKind::goodbye:
            from.left = true;
            from.cause = FailureCause::unpack(static_cast<std::uint32_t>(frame.id));
            handle_close(peer);
            return;
        case FrameKind::query:
            add_query(peer, {frame.offset, frame.id});
            return;
        case FrameKind::answer:
            if (auto answer = decode_answer(frame, from.body); !answer)
                handle_close(peer);
            else
                lanes_.wait_registry().receive_answer(lanes_.global_rank(peer), {frame.offset, frame.id},
                                                      std::move(*answer));
            return;
    }
}

}  // namespace paceline::executor
