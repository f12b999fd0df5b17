#include "shm/group_segment.hpp"

#include <algorithm>
#include <cerrno>
#include <new>
#include <system_error>

#include "call/poll_interval.hpp"
#include "shm/futex.hpp"

namespace paceline::shm {
namespace {

constexpr std::size_t kGroupHeadBytes = 8192;

struct GroupHead {
    std::atomic<std::uint32_t> arrived{0};
    std::atomic<std::uint32_t> is_canceled{0};
    std::atomic<std::uint32_t> has_arrived[kMaxRanks]{};  // by index in `mesh_ranks_`
};
static_assert(sizeof(GroupHead) <= kGroupHeadBytes);

GroupHead& head_in(const Segment& segment) {
    return *std::launder(reinterpret_cast<GroupHead*>(segment.data()));
}

}  // namespace

std::unique_ptr<GroupSegment> GroupSegment::open(HostMesh& mesh, std::vector<int> mesh_ranks, RegionId id,
                                                 std::size_t nbytes, HostMesh::Deadline deadline) {
    std::unique_ptr<GroupSegment> shared(new GroupSegment(mesh, std::move(mesh_ranks), id));
    const std::size_t all = kGroupHeadBytes + nbytes;
    if (shared->is_creator()) {
        shared->segment_ = Segment::create(all, PagePolicy::small);
        if (!shared->segment_) throw std::system_error(errno, std::generic_category(), "memfd_create");
        new (shared->segment_->data()) GroupHead;
        if (shared->mesh_ranks_.size() > 1) mesh.offer(id, shared->segment_);
        return shared;
    }
    const FetchResult found = mesh.fetch(shared->mesh_ranks_[0], id, deadline);
    if (found.error != 0) throw std::system_error(found.error, std::generic_category(), "the memory of a group");
    if (!found.segment || found.segment->size() < all) return nullptr;
    shared->segment_ = found.segment;
    return shared;
}

GroupSegment::~GroupSegment() {
    if (is_complete_ || is_forked_from_member()) return;
    if (segment_) {
        GroupHead& head = head_in(*segment_);
        head.is_canceled.store(1, std::memory_order_release);
        futex_wake_all(head.arrived);
    }
    if (is_creator()) mesh_.cancel(id_);
}

std::uint8_t* GroupSegment::data() const {
    return segment_->data() + kGroupHeadBytes;
}

bool GroupSegment::wait_for_all(HostMesh::Deadline deadline) {
    GroupHead& head = head_in(*segment_);
    const auto members = static_cast<std::uint32_t>(mesh_ranks_.size());
    const auto place =
        static_cast<std::size_t>(std::find(mesh_ranks_.begin(), mesh_ranks_.end(), mesh_.rank()) - mesh_ranks_.begin());
    head.has_arrived[place].store(1, std::memory_order_release);
    // acq_rel: the writes of all members are visible to a member that increments the count to `members` or reads this
    // value.
    if (head.arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == members) futex_wake_all(head.arrived);
    for (;;) {
        const std::uint32_t seen = head.arrived.load(std::memory_order_acquire);
        if (seen == members) break;
        const auto left = deadline - std::chrono::steady_clock::now();
        if (left <= left.zero() || cannot_complete()) return false;
        futex_wait(head.arrived, seen, std::chrono::nanoseconds(std::min<decltype(left)>(left, kPollInterval)).count());
    }
    is_complete_ = true;
    if (is_creator() && members > 1) {
        mesh_.withdraw(id_);
        segment_->close_descriptor();
    }
    return true;
}

// Returns true if a member has canceled the segment, or has died or left without arriving.
bool GroupSegment::cannot_complete() const {
    if (head_in(*segment_).is_canceled.load(std::memory_order_acquire) != 0) return true;
    for (std::size_t i = 0; i < mesh_ranks_.size(); ++i)
        if (mesh_.is_gone(mesh_ranks_[i]) && head_in(*segment_).has_arrived[i].load(std::memory_order_acquire) == 0)
            return true;
    return false;
}

}  // namespace paceline::shm
