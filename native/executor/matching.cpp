// Reading and writing frames, and matching messages with receives (see the note in messenger.hpp).
#include <algorithm>
#include <array>

#include "call/completion_counter.hpp"
#include "executor/messenger.hpp"

namespace paceline::executor {
namespace {

constexpr std::size_t kPartBytes = 1 << 20;  // the longest data frame, which other frames may have to wait for

}  // namespace

// Gives `request` a message that came before the receive was made.
void Messenger::take(Arrival& arrival, const std::shared_ptr<Request>& request) {
    const Frame& frame = arrival.frame;
    if (frame.kind == FrameKind::offer) {
        --state(arrival.peer).offers_held;
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

// Whether the message has the size and dtype of the receive; if not, fails the receive.
bool Messenger::fits(const Frame& frame, int peer, const std::shared_ptr<Request>& request) {
    request->source_ = peer;
    if (frame.nbytes == request->memory_.nbytes() && frame.dtype == request->dtype_) return true;
    Outcome outcome;
    outcome.code = Code::mismatch;
    outcome.split_from = peer;
    outcome.split_to = lanes_.rank();
    outcome.split_sent = frame.nbytes;
    outcome.split_expected = request->memory_.nbytes();
    outcome.calls.resize(2);
    outcome.calls[0].dtype = frame.dtype;
    outcome.calls[1].dtype = request->dtype_;
    finish(request, std::move(outcome));
    return false;
}

// Counts an eager message as taken, and returns the credit once there is half a window of it.
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
    CompletionCounter::of_process().announce();
}

// Writes the frames that wait for `peer`; true when anything moved.
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
        const std::ptrdiff_t n = lanes_.peer(peer).control->write({pieces.data(), used});
        if (n == link::kClosed) {
            // The frames that it sent before it went are still to be read, and may say why it went.
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
            to.outgoing.push_back(std::move(over));  // behind the frames that wait, which so get through
        } else {
            finish(over.request, {});
        }
    }
    return moved;
}

// Reads the frames that came from `peer`; true when anything moved.
bool Messenger::receive_from(int peer) {
    PeerState& from = state(peer);
    link::Lane& lane = *lanes_.peer(peer).control;
    bool moved = false;
    for (;;) {
        // After a failure the tensors belong to the program again and must not be written.
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

// Decides where the body of the frame that has come is read to; false when the frame breaks the protocol.
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
            return is_next(peer) && from.offers_held < kMostOffers;
        default:
            return true;
    }
}

// Whether the message has a new id: ids only rise.
bool Messenger::is_next(int peer) {
    PeerState& from = state(peer);
    if (from.frame.id <= from.latest_id) return false;
    from.latest_id = from.frame.id;
    return true;
}

// Matches the message that has come with a posted receive: an eager one is then read straight into the tensor, an offer
// is answered. False when there is none, or when an eager message does not fit it.
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
            from.frame.id = 0;  // marks its bytes as to be dropped: end_body() only credits them
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
            if (!match_posted(peer)) {
                arrivals_.push_back({frame, peer, {}});
                ++from.offers_held;
            }
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
                outcome.split_from = lanes_.rank();
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
            // Passed on, so that no rank sees this one leave before it knows why.
            if (auto outcome = decode(from.body, lanes_.size()); !outcome)
                closed(peer);
            else if (!failure_)
                break_group(std::move(*outcome), true);
            return;
        case FrameKind::goodbye:
            from.left = true;
            from.cause = Cause::unpack(static_cast<std::uint32_t>(frame.id));
            closed(peer);
            return;
    }
}

// Copies the body of a frame, so that it no longer depends on the tensor of its request.
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

}  // namespace paceline::executor
