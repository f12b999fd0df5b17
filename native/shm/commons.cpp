#include "shm/commons.hpp"

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "call/turns.hpp"
#include "shm/futex.hpp"

namespace paceline::shm {
namespace {

constexpr std::size_t kMeetingBytes = 8192;

struct Meeting {
    std::atomic<std::uint32_t> arrived{0};
    std::atomic<std::uint32_t> given_up{0};
    std::atomic<std::uint32_t> has_arrived[kMaxRanks]{};  // by place among the members
};
static_assert(sizeof(Meeting) <= kMeetingBytes);

Meeting& meeting_in(const Segment& segment) {
    return *std::launder(reinterpret_cast<Meeting*>(segment.data()));
}

}  // namespace

std::unique_ptr<Commons> Commons::open(Mesh& mesh, std::vector<int> places, RegionId id, std::size_t nbytes,
                                       Mesh::Deadline deadline) {
    std::unique_ptr<Commons> commons(new Commons(mesh, std::move(places), id));
    const std::size_t all = kMeetingBytes + nbytes;
    if (commons->is_mine()) {
        commons->segment_ = Segment::create(all, Pages::small);
        if (!commons->segment_) throw std::system_error(errno, std::generic_category(), "memfd_create");
        new (commons->segment_->data()) Meeting;
        if (commons->places_.size() > 1) mesh.offer(id, commons->segment_);
        return commons;
    }
    const Found found = mesh.fetch(commons->places_[0], id, deadline);
    if (found.shortage != 0) throw std::system_error(found.shortage, std::generic_category(), "the memory of a group");
    if (!found.segment || found.segment->size() < all) return nullptr;
    commons->segment_ = found.segment;
    return commons;
}

Commons::~Commons() {
    if (have_met_ || forked_from_member()) return;
    if (segment_) {
        Meeting& meeting = meeting_in(*segment_);
        meeting.given_up.store(1, std::memory_order_release);
        futex_wake_all(meeting.arrived);
    }
    if (is_mine()) mesh_.give_up(id_);
}

std::uint8_t* Commons::data() const {
    return segment_->data() + kMeetingBytes;
}

bool Commons::meet(Mesh::Deadline deadline) {
    Meeting& meeting = meeting_in(*segment_);
    const auto members = static_cast<std::uint32_t>(places_.size());
    const auto place =
        static_cast<std::size_t>(std::find(places_.begin(), places_.end(), mesh_.rank()) - places_.begin());
    meeting.has_arrived[place].store(1, std::memory_order_release);
    // An acquire too: whoever completes the number, or sees it complete, sees all that the members have written.
    if (meeting.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == members) futex_wake_all(meeting.arrived);
    for (;;) {
        const std::uint32_t seen = meeting.arrived.load(std::memory_order_acquire);
        if (seen == members) break;
        const auto left = deadline - std::chrono::steady_clock::now();
        if (left <= left.zero() || waits_in_vain()) return false;
        futex_wait(meeting.arrived, seen, std::chrono::nanoseconds(std::min<decltype(left)>(left, kTurn)).count());
    }
    have_met_ = true;
    if (is_mine() && members > 1) {
        mesh_.withdraw(id_);
        segment_->close_descriptor();
    }
    return true;
}

// Whether a member has given up, or is gone and has not arrived.
bool Commons::waits_in_vain() const {
    if (meeting_in(*segment_).given_up.load(std::memory_order_acquire) != 0) return true;
    for (std::size_t i = 0; i < places_.size(); ++i)
        if (mesh_.is_gone(places_[i]) && meeting_in(*segment_).has_arrived[i].load(std::memory_order_acquire) == 0)
            return true;
    return false;
}

}  // namespace paceline::shm
