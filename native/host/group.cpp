#include "host/group.hpp"

#include <sched.h>

#include <bit>
#include <cerrno>
#include <new>
#include <system_error>

#include "process/cores.hpp"
#include "shm/futex.hpp"

namespace paceline::host {
namespace {

using Clock = std::chrono::steady_clock;

// Long enough for a peer that is about to publish, short enough not to keep a
// peer from the core that it needs. The thread of asynchronous calls competes with the program's own, so it spins less.
constexpr int kSpins = 4000;
constexpr int kBackgroundSpins = 100;
constexpr int kYields = 20;
// A yield that took this long gave the core to a thread that computes. To yield again would cost another of its time
// slices, whereas the scheduler soon runs a thread that is woken from its sleep.
constexpr auto kLongYield = std::chrono::microseconds(500);
constexpr std::int64_t kSliceNs =
    20'000'000;  // between two looks at the others' verdicts; news of a death ends a slice early
constexpr int kSlicesPerInterruptCheck = 5;

std::uint64_t bit(int rank) {
    return std::uint64_t{1} << rank;
}

std::vector<int> ranks_of(std::uint64_t mask) {
    std::vector<int> ranks;
    for (; mask != 0; mask &= mask - 1) ranks.push_back(std::countr_zero(mask));
    return ranks;
}

}  // namespace

Group::Group(shm::Mesh& mesh, std::vector<int> members, std::uint64_t id, std::size_t slot_bytes)
    : mesh_(mesh), members_(std::move(members)), id_(id), slot_bytes_(slot_bytes), sleeper_(mesh.news()) {
    size_ = static_cast<int>(members_.size());
    for (int r = 0; r < size_; ++r) {
        if (members_[static_cast<std::size_t>(r)] == mesh.rank())
            rank_ = r;
        else
            peer_mask_ |= bit(members_[static_cast<std::size_t>(r)]);
    }
    crowded_ = size_ > usable_cores();
    segments_.resize(members_.size());
    controls_.resize(members_.size());
    sources_.resize(members_.size());
}

std::unique_ptr<Group> Group::create(shm::Mesh& mesh, std::vector<int> members, std::uint64_t id,
                                     std::size_t slot_bytes, Clock::time_point deadline) {
    std::unique_ptr<Group> group(new Group(mesh, std::move(members), id, slot_bytes));
    const std::size_t nbytes = kControlBytes + kSlots * slot_bytes;
    for (int r = 0; r < group->size_; ++r) {
        auto& segment = group->segments_[static_cast<std::size_t>(r)];
        if (r == group->rank_) {
            segment = shm::Segment::create(nbytes);
            if (!segment) throw std::system_error(errno, std::generic_category(), "memfd_create");
            new (segment->data()) Control;
            mesh.offer(id, *segment, group->peer_mask_);
        }
    }
    for (int r = 0; r < group->size_; ++r) {
        auto& segment = group->segments_[static_cast<std::size_t>(r)];
        const int member = group->members_[static_cast<std::size_t>(r)];
        if (r != group->rank_) segment = mesh.region(member, id, deadline);
        if (const int why = segment ? 0 : mesh.shortage(member, id))
            throw std::system_error(why, std::generic_category(), "a segment of another rank");
        if (!segment || segment->size() < nbytes) return nullptr;
        group->controls_[static_cast<std::size_t>(r)] = reinterpret_cast<Control*>(segment->data());
    }
    return group;
}

Group::~Group() {
    if (forked_from_member()) return;
    if (controls_[static_cast<std::size_t>(rank_)] != nullptr && !broken_) {
        Control& mine = control(rank_);
        mine.cause = mesh_.blamed().pack();
        mine.gave_up.store(GaveUp::left, std::memory_order_release);
        for (Cell& each : mine.cells) shm::futex_wake_all(each.round);
    }
    mesh_.withdraw(id_, peer_mask_);
}

void Group::publish(std::uint32_t round) {
    Cell& mine = cell(rank_, round);
    // seq_cst, paired with the sleeper's increment and re-check in await_slowly: one of the two sees the other.
    mine.round.store(round, std::memory_order_seq_cst);
    if (control(rank_).sleepers.load(std::memory_order_seq_cst) != 0) shm::futex_wake_all(mine.round);
}

bool Group::await(std::uint32_t round) {
    for (int step = 1; step < size_; ++step) {
        const int peer = rank_ + step < size_ ? rank_ + step : rank_ + step - size_;
        if (cell(peer, round).round.load(std::memory_order_acquire) != round && !await_slowly(peer, round))
            return false;
    }
    return true;
}

// Waits for `peer` to publish `round`: spins or yields, then sleeps on the cell's futex in slices. After each slice it
// looks, in this order, for the verdict of another rank, for ranks that have gone, for the deadline and for an
// interrupt. The order matters: a verdict names the first cause, and a rank that gave up because of a dead one also
// leaves.
bool Group::await_slowly(int peer, std::uint32_t round) {
    const std::atomic<std::uint32_t>& word = cell(peer, round).round;
    if (crowded_) {
        auto before = Clock::now();
        for (int i = 0; i < kYields; ++i) {
            sched_yield();
            if (word.load(std::memory_order_acquire) == round) return true;
            const auto now = Clock::now();
            if (now - before > kLongYield) break;
            before = now;
        }
    } else {
        const int spins = background_ ? kBackgroundSpins : kSpins;
        for (int i = 0; i < spins; ++i) {
            shm::relax_cpu();
            if (word.load(std::memory_order_acquire) == round) return true;
        }
    }
    if (!clock_started_) {
        started_ = Clock::now();
        clock_started_ = true;
    }
    std::atomic<std::uint32_t>& sleepers = control(peer).sleepers;
    for (int slice = 1;; ++slice) {
        sleepers.fetch_add(1, std::memory_order_seq_cst);
        const std::uint32_t seen = word.load(std::memory_order_seq_cst);
        if (seen != round) sleeper_.sleep(word, seen, kSliceNs);
        sleepers.fetch_sub(1, std::memory_order_relaxed);
        if (word.load(std::memory_order_acquire) == round) return true;

        for (int other = 0; other < size_; ++other)
            if (other != rank_ && adopt_verdict(other)) return false;
        const std::uint64_t lost = members_of(mesh_.liveness().lost.load(std::memory_order_acquire));
        const std::uint64_t left = members_of(mesh_.liveness().left.load(std::memory_order_acquire)) | left_group();
        const std::int64_t waited_ns = std::chrono::nanoseconds(Clock::now() - started_).count();
        // Read after the masks of the lost and the left, whose acquire makes visible whatever a peer published before
        // it went. Otherwise a peer that completed the round and then left would be reported as missing.
        const std::uint64_t missing = missing_in(round);
        if ((missing & bit(peer)) == 0) return true;
        if ((missing & (lost | left)) != 0) return give_up_without(missing, missing & lost, missing & left, waited_ns);
        if (waited_ns > timeout_ns_) return give_up(GaveUp::timed_out, missing, 0, 0, waited_ns);
        if (slice % kSlicesPerInterruptCheck == 0 && *interrupted_ && (*interrupted_)())
            return give_up(GaveUp::interrupted, missing, 0, 0, waited_ns);
    }
}

std::uint64_t Group::members_of(std::uint64_t mesh_mask) const {
    std::uint64_t mask = 0;
    for (int r = 0; r < size_; ++r)
        if (mesh_mask & bit(members_[static_cast<std::size_t>(r)])) mask |= bit(r);
    return mask;
}

std::uint64_t Group::missing_in(std::uint32_t round) const {
    std::uint64_t mask = 0;
    for (int r = 0; r < size_; ++r)
        if (r != rank_ && cell(r, round).round.load(std::memory_order_acquire) != round) mask |= bit(r);
    return mask;
}

// The members that destroyed this group.
std::uint64_t Group::left_group() const {
    std::uint64_t mask = 0;
    for (int r = 0; r < size_; ++r)
        if (r != rank_ && control(r).gave_up.load(std::memory_order_acquire) == GaveUp::left) mask |= bit(r);
    return mask;
}

// Why `rank` left, if it said so in this group or to the mesh.
Cause Group::cause_of(int rank) const {
    const Control& theirs = control(rank);
    if (theirs.gave_up.load(std::memory_order_acquire) == GaveUp::left && theirs.cause != 0)
        return Cause::unpack(theirs.cause);
    return mesh_.blamed_by(members_[static_cast<std::size_t>(rank)]);
}

// Blames the ranks that went first: dead ranks before those that left, and those without a cause of their own before
// those that gave up because of another rank.
bool Group::give_up_without(std::uint64_t missing, std::uint64_t lost, std::uint64_t left, std::int64_t waited_ns) {
    const std::uint64_t gone = lost != 0 ? lost : left;
    std::uint64_t first = 0;
    for (const int r : ranks_of(gone))
        if (!cause_of(r).known()) first |= bit(r);
    const std::uint64_t named = first != 0 ? first : gone;
    const Cause cause = first != 0 ? Cause{} : cause_of(std::countr_zero(gone));
    return give_up(GaveUp::peer_lost, missing, named, lost != 0 ? 0 : named, waited_ns, cause);
}

bool Group::give_up(GaveUp reason, std::uint64_t missing, std::uint64_t gone, std::uint64_t left,
                    std::int64_t waited_ns, Cause cause) {
    outcome_.code = reason == GaveUp::timed_out   ? Code::timed_out
                    : reason == GaveUp::peer_lost ? Code::peer_lost
                    : reason == GaveUp::starved   ? Code::starved
                                                  : Code::interrupted;
    outcome_.missing = ranks_of(missing);
    outcome_.gone = ranks_of(gone);
    outcome_.left = ranks_of(left);
    outcome_.cause = cause;
    outcome_.waited_ns = waited_ns;
    // The latest call of a missing rank shows what it did instead.
    outcome_.calls.resize(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r) {
        CallHeader& latest = outcome_.calls[static_cast<std::size_t>(r)];
        for (std::uint32_t at = 0; at < kSlots; ++at) {
            const CallHeader& header = control(r).cells[at].header;
            if (header.sequence > latest.sequence) latest = header;
        }
    }
    broken_ = true;
    Control& mine = control(rank_);
    mine.missing = missing;
    mine.gone = gone;
    mine.left = left;
    mine.waited_ns = waited_ns;
    mine.cause = cause.pack();
    mine.gave_up.store(reason, std::memory_order_release);
    for (Cell& each : mine.cells) shm::futex_wake_all(each.round);
    if (reason == GaveUp::peer_lost && gone != 0) {
        const int first = std::countr_zero(gone);
        mesh_.blame(cause.known() ? cause : Cause{mesh_.name(members_[static_cast<std::size_t>(first)]), left != 0});
    }
    return false;
}

// Adopts the verdict of `peer`, if it gave up.
bool Group::adopt_verdict(int peer) {
    const Control& theirs = control(peer);
    const GaveUp reason = theirs.gave_up.load(std::memory_order_acquire);
    if (reason == GaveUp::no || reason == GaveUp::left) return false;
    outcome_.reporter = peer;
    give_up(reason, theirs.missing, theirs.gone, theirs.left, theirs.waited_ns, Cause::unpack(theirs.cause));
    return true;
}

// The first round of a call: publishes its header and `payload`, waits for the peers' headers and compares them.
bool Group::begin(const Call& call, const void* payload, std::size_t payload_bytes) {
    header_ = {sequence_,
               count_in_header(call),
               call.root,
               call.operation,
               call.dtype,
               call.reduce_op,
               call.region != 0,
               call.region,
               call.offset,
               0,
               {}};
    const std::uint32_t round = round_++;
    Cell& mine = cell(rank_, round);
    mine.header = header_;
    if (payload_bytes != 0) std::memcpy(mine.payload, payload, payload_bytes);
    publish(round);
    if (!await(round)) return false;
    for (int r = 0; r < size_; ++r)
        if (!cell(r, round).header.fits(header_)) return mismatch(round);
    return true;
}

bool Group::mismatch(std::uint32_t round) {
    outcome_.code = Code::mismatch;
    outcome_.calls.resize(static_cast<std::size_t>(size_));
    for (int r = 0; r < size_; ++r) outcome_.calls[static_cast<std::size_t>(r)] = cell(r, round).header;
    return false;
}

Outcome Group::run(Call& call, const Interrupted& interrupted, bool background) {
    if (broken_) return outcome_;
    outcome_ = {};
    interrupted_ = &interrupted;
    background_ = background;
    timeout_ns_ = call.timeout_ns;
    clock_started_ = false;
    ++sequence_;
    switch (call.operation) {
        case Operation::all_reduce:
            all_reduce(call);
            break;
        case Operation::reduce:
            reduce(call);
            break;
        case Operation::broadcast:
            broadcast(call);
            break;
        case Operation::all_gather:
            gather(call, true);
            break;
        case Operation::gather:
            gather(call, rank_ == call.root);
            break;
        case Operation::reduce_scatter:
            reduce_scatter(call);
            break;
        case Operation::scatter:
            scatter(call);
            break;
        case Operation::all_to_all:
            all_to_all(call);
            break;
        case Operation::barrier:
        case Operation::none:
            begin(call, nullptr, 0);
            break;
    }
    return outcome_;
}

}  // namespace paceline::host
