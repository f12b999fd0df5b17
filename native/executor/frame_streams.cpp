// Writes pending frames to the control lanes and reads incoming frames incrementally. The body of a frame is read
// directly into the memory that message_matching.cpp chooses.
#include <algorithm>
#include <array>
#include <cstring>

#include "executor/messenger.hpp"

namespace paceline::executor {

void Messenger::push(int peer, Frame frame, std::vector<std::uint8_t> owned_body, std::shared_ptr<Request> request) {
    PeerState& to = state(peer);
    if (to.lost || to.left) return;
    to.outgoing.push_back({frame, std::move(owned_body), std::move(request), 0});
}

// Copies the body of a frame, so that the frame no longer refers to the request's tensor.
void Messenger::copy_body(OutgoingFrame& outgoing) {
    if (!outgoing.request) return;
    const bool in_parts = outgoing.frame.kind == FrameKind::data;
    const std::size_t from = in_parts ? outgoing.frame.offset : 0;
    outgoing.owned_body.resize(in_parts ? outgoing.frame.part : outgoing.frame.nbytes);
    for (std::size_t at = 0; at < outgoing.owned_body.size();) {
        const ByteRange range = outgoing.request->tensor_.run(from + at, outgoing.owned_body.size() - at);
        std::memcpy(outgoing.owned_body.data() + at, range.data, range.nbytes);
        at += range.nbytes;
    }
    outgoing.request = nullptr;
}

// Writes the frames pending for `peer`; returns whether any data was written.
bool Messenger::flush(int peer) {
    PeerState& to = state(peer);
    bool moved = false;
    while (!to.outgoing.empty() && !to.is_write_closed) {
        OutgoingFrame& next = to.outgoing.front();
        const bool in_parts = next.frame.kind == FrameKind::data;
        const std::size_t body = in_parts ? next.frame.part : next.request ? next.frame.nbytes : next.owned_body.size();
        std::array<ByteRange, link::kMaxRanges> ranges;
        std::size_t used = 0;
        const std::size_t head = sizeof(Frame);
        if (next.sent < head)
            ranges[used++] = {reinterpret_cast<std::uint8_t*>(&next.frame) + next.sent, head - next.sent};
        const std::size_t at = next.sent < head ? 0 : next.sent - head;
        if (at < body) {
            if (next.request)
                used += next.request->tensor_.slice(next.frame.offset + at, body - at, ranges.data() + used,
                                                    ranges.size() - used);
            else
                ranges[used++] = {next.owned_body.data() + at, body - at};
        }
        const std::ptrdiff_t n = lanes_.peer(peer).control->write({ranges.data(), used});
        if (n == link::kClosed) {
            // Frames that the peer sent before it exited may still be unread and may contain the reason.
            to.is_write_closed = true;
            return true;
        }
        if (n == 0) return moved;
        moved = true;
        next.sent += static_cast<std::size_t>(n);
        if (next.sent < head + body) continue;
        OutgoingFrame over = std::move(next);
        to.outgoing.pop_front();
        if (!over.request) continue;
        const std::size_t sent = over.frame.offset + over.frame.part;
        if (in_parts && sent < over.frame.nbytes) {
            over.frame.offset = sent;
            over.frame.part = static_cast<std::uint32_t>(std::min(kPartBytes, over.frame.nbytes - sent));
            over.sent = 0;
            to.outgoing.push_back(std::move(over));  // after the pending frames, which are sent between the parts
        } else {
            finish(over.request, {});
        }
    }
    return moved;
}

// Reads the frames from `peer`; returns whether any data was read.
bool Messenger::receive_from(int peer) {
    PeerState& from = state(peer);
    link::Lane& lane = *lanes_.peer(peer).control;
    bool moved = false;
    for (;;) {
        // After a failure the tensors must not be written to, because the program may use them again.
        if (from.left || from.lost || failure_) return moved;
        std::array<ByteRange, link::kMaxRanges> ranges;
        std::size_t used = 0;
        const std::size_t body = from.frame_read < sizeof(Frame)      ? 0
                                 : from.frame.kind == FrameKind::data ? from.frame.part
                                 : from.frame.kind == FrameKind::eager || from.frame.kind == FrameKind::waiting ||
                                         from.frame.kind == FrameKind::failure || from.frame.kind == FrameKind::answer
                                     ? from.frame.nbytes
                                     : 0;
        if (from.frame_read < sizeof(Frame)) {
            ranges[used++] = {reinterpret_cast<std::uint8_t*>(&from.frame) + from.frame_read,
                              sizeof(Frame) - from.frame_read};
        } else if (from.body_read < body) {
            if (from.body_for)
                used = from.body_for->tensor_.slice(from.frame.offset + from.body_read, body - from.body_read,
                                                    ranges.data(), ranges.size());
            else
                ranges[used++] = {from.body.data() + from.body_read, body - from.body_read};
        } else {
            end_body(peer);
            from.frame_read = from.body_read = 0;
            from.body_for = nullptr;
            from.body.clear();
            continue;
        }
        const std::ptrdiff_t n = lane.read({ranges.data(), used});
        if (n == link::kClosed) {
            handle_close(peer);
            return true;
        }
        if (n == 0) return moved;
        moved = true;
        if (from.frame_read < sizeof(Frame)) {
            from.frame_read += static_cast<std::size_t>(n);
            if (from.frame_read == sizeof(Frame) && !begin_body(peer)) {
                handle_close(peer);
                return true;
            }
        } else {
            from.body_read += static_cast<std::size_t>(n);
        }
    }
}

}  // namespace paceline::executor
