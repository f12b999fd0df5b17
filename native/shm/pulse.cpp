#include "shm/pulse.hpp"

#include <pthread.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <new>

#include "process/fork_guard.hpp"
#include "shm/futex.hpp"

namespace paceline::shm {
namespace {

// From <linux/futex.h> since Linux 5.16; the headers that we are built with may be older.
constexpr long kFutexWaitV = 449;
constexpr std::uint32_t kWord32 = 2;
struct WaitV {
    std::uint64_t expected;
    std::uint64_t address;
    std::uint32_t flags;
    std::uint32_t reserved;
};

// Sleeps until a word is woken or no longer holds its expected value; false when the kernel cannot do that.
bool wait_for_any(const std::vector<WaitV>& words) {
    if (syscall(kFutexWaitV, words.data(), static_cast<unsigned>(words.size()), 0, nullptr, 0) >= 0) return true;
    return errno == EAGAIN || errno == EINTR;
}

WaitV expecting(const std::atomic<std::uint32_t>& word, std::uint32_t value) {
    return {value, reinterpret_cast<std::uintptr_t>(&word), kWord32, 0};
}

Held* words_of(const Segment& segment) {
    return std::launder(reinterpret_cast<Held*>(segment.data()));
}

}  // namespace

std::unique_ptr<Pulse> Pulse::create(int ranks) {
    auto segment = Segment::create(static_cast<std::size_t>(ranks) * sizeof(Held));
    if (!segment) return nullptr;
    for (int r = 0; r < ranks; ++r) new (segment->data() + static_cast<std::size_t>(r) * sizeof(Held)) Held;
    return std::unique_ptr<Pulse>(new Pulse(std::move(segment), ranks));
}

bool Pulse::hold() {
    static_assert(sizeof(Entry) == sizeof(Held));
    const auto holder = static_cast<std::uint32_t>(syscall(SYS_gettid)) |
                        FUTEX_WAITERS;  // without the bit the kernel marks the word, but wakes nobody
    robust_list* next = &head_.list;
    for (std::size_t r = entries_.size(); r-- > 0;) {
        entries_[r].list.next = next;
        next = &entries_[r].list;
        words_of(*segment_)[r].holder.store(holder, std::memory_order_relaxed);
    }
    head_.list.next = next;
    head_.futex_offset = static_cast<long>(reinterpret_cast<std::uintptr_t>(words_of(*segment_)) -
                                           reinterpret_cast<std::uintptr_t>(entries_.data()));
    head_.list_op_pending = nullptr;
    return syscall(SYS_set_robust_list, &head_, sizeof head_) == 0;
}

void Pulse::set_note(std::uint32_t note) {
    for (std::size_t r = 0; r < entries_.size(); ++r)
        words_of(*segment_)[r].note.store(note, std::memory_order_release);
}

void Pulse::release() {
    syscall(SYS_set_robust_list, nullptr, sizeof head_);
}

bool Watch::is_possible() {
    // A kernel that knows the call rejects an empty list with EINVAL; others return ENOSYS.
    return syscall(kFutexWaitV, nullptr, 0, 0, nullptr, 0) < 0 && errno == EINVAL;
}

Watch::~Watch() {
    if (forked_from_member()) {
        if (thread_.joinable()) thread_.detach();  // it does not exist in a forked child
        return;
    }
    close();
}

void Watch::add(int peer, std::shared_ptr<Segment> segment, int place) {
    if (segment->size() < static_cast<std::size_t>(place + 1) * sizeof(Held)) return;
    const std::lock_guard hold(mutex_);
    if (closing_.load(std::memory_order_relaxed)) return;
    const Held* word = &words_of(*segment)[place];
    if (!watched_.try_emplace(peer, Watched{std::move(segment), word}).second) return;
    changed_.fetch_add(1, std::memory_order_release);
    futex_wake_all(changed_);
    if (!thread_.joinable()) thread_ = std::thread([this] { run(); });
}

void Watch::close() {
    {
        const std::lock_guard hold(mutex_);
        closing_.store(true, std::memory_order_relaxed);
        changed_.fetch_add(1, std::memory_order_release);
        futex_wake_all(changed_);
    }
    if (thread_.joinable()) thread_.join();
}

void Watch::run() {
    pthread_setname_np(pthread_self(), "paceline-watch");
    for (;;) {
        std::vector<WaitV> words{expecting(changed_, changed_.load(std::memory_order_acquire))};
        if (closing_.load(std::memory_order_relaxed)) return;
        std::vector<std::pair<int, std::uint32_t>> ended;
        {
            const std::lock_guard hold(mutex_);
            for (auto each = watched_.begin(); each != watched_.end();) {
                const std::uint32_t holder = each->second.word->holder.load(std::memory_order_acquire);
                if ((holder & FUTEX_OWNER_DIED) == 0) {
                    words.push_back(expecting(each->second.word->holder, holder));
                    ++each;
                    continue;
                }
                ended.emplace_back(each->first, each->second.word->note.load(std::memory_order_acquire));
                each = watched_.erase(each);
            }
        }
        for (const auto& [peer, note] : ended) ended_(peer, note);
        if (ended.empty() && !wait_for_any(words)) return;
    }
}

}  // namespace paceline::shm
