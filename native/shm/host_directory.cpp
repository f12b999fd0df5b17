#include "shm/host_directory.hpp"

#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <new>

#include "shm/futex.hpp"

namespace paceline::shm {
namespace {

constexpr std::size_t kHeadBytes = 4096;

std::size_t nbytes_for(int ranks) {
    return kHeadBytes + static_cast<std::size_t>(ranks) * sizeof(RankEntry);
}

}  // namespace

std::shared_ptr<HostDirectory> HostDirectory::create(int ranks) {
    static_assert(sizeof(Header) <= kHeadBytes);
    auto segment = Segment::create(nbytes_for(ranks));
    if (!segment) return nullptr;
    Header* const head = new (segment->data()) Header{static_cast<std::uint32_t>(ranks), 0, {}, 0};
    if (getrandom(head->key.data(), head->key.size(), 0) != static_cast<ssize_t>(head->key.size())) return nullptr;
    for (int r = 0; r < ranks; ++r)
        new (segment->data() + kHeadBytes + static_cast<std::size_t>(r) * sizeof(RankEntry)) RankEntry;
    return std::shared_ptr<HostDirectory>(new HostDirectory(std::move(segment), ranks));
}

std::shared_ptr<HostDirectory> HostDirectory::adopt(int fd, int ranks) {
    auto segment = Segment::adopt(fd, nbytes_for(ranks));
    if (!segment) return nullptr;
    std::shared_ptr<HostDirectory> directory(new HostDirectory(std::move(segment), ranks));
    return directory->head().ranks == static_cast<std::uint32_t>(ranks) ? directory : nullptr;
}

HostDirectory::Header& HostDirectory::head() const {
    return *std::launder(reinterpret_cast<Header*>(segment_->data()));
}

RankEntry& HostDirectory::entry(int rank) const {
    return std::launder(reinterpret_cast<RankEntry*>(segment_->data() + kHeadBytes))[rank];
}

void HostDirectory::notify() const {
    changes().fetch_add(1, std::memory_order_release);
    futex_wake_all(changes());
}

void HostDirectory::arrive(int rank) const {
    entry(rank).state.store(RankState::present, std::memory_order_release);
    if (head().arrived.fetch_add(1, std::memory_order_acq_rel) + 1 == head().ranks) notify();
}

void HostDirectory::leave(int rank) const {
    entry(rank).state.store(RankState::left, std::memory_order_release);
    notify();
}

bool HostDirectory::mark_lost(int rank) const {
    RankState before = RankState::present;
    return entry(rank).state.compare_exchange_strong(before, RankState::lost, std::memory_order_acq_rel);
}

std::vector<int> HostDirectory::absent(std::chrono::milliseconds timeout) const {
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (;;) {
        const std::uint32_t seen = changes().load(std::memory_order_acquire);
        std::vector<int> missing;
        for (int r = 0; r < ranks_; ++r)
            if (entry(r).state.load(std::memory_order_acquire) == RankState::absent) missing.push_back(r);
        const auto left = deadline - std::chrono::steady_clock::now();
        if (missing.empty() || left <= left.zero()) return missing;
        futex_wait(changes(), seen, std::chrono::nanoseconds(left).count());
    }
}

RobustFutexes::RobustFutexes(const HostDirectory& directory, int rank)
    : words_(directory.entry(rank).futexes),
      entries_(static_cast<std::size_t>(std::min(directory.size() - 1, kMaxWatchers))) {}

void RobustFutexes::acquire() {
    static_assert(sizeof(Entry) == sizeof(RobustFutex));
    const auto holder = static_cast<std::uint32_t>(syscall(SYS_gettid)) |
                        FUTEX_WAITERS;  // without this bit the kernel marks the word but wakes no waiter
    robust_list* next = &head_.list;
    for (std::size_t r = entries_.size(); r-- > 0;) {
        entries_[r].list.next = next;
        next = &entries_[r].list;
    }
    head_.list.next = next;
    head_.futex_offset =
        static_cast<long>(reinterpret_cast<std::uintptr_t>(words_) - reinterpret_cast<std::uintptr_t>(entries_.data()));
    head_.list_op_pending = nullptr;
    if (syscall(SYS_set_robust_list, &head_, sizeof head_) != 0) return;
    for (std::size_t r = 0; r < entries_.size(); ++r) words_[r].holder.store(holder, std::memory_order_release);
}

void RobustFutexes::release() {
    syscall(SYS_set_robust_list, nullptr, sizeof head_);
}

}  // namespace paceline::shm
