#include "record/recorder.hpp"

#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace paceline::record {
namespace {

constexpr std::int64_t kFirstPairsNs = 100'000;
constexpr std::uint64_t kFirstGapNs = 1'000'000;
constexpr std::uint64_t kMaxGapNs = 10'000'000'000;

thread_local std::uint32_t this_thread = 0;
thread_local std::uint32_t next_site = 0;

template <std::size_t N>
void write_text(Text<N>& to, std::string_view text) {
    std::uint64_t words[N / sizeof(std::uint64_t)] = {};
    std::memcpy(words, text.data(), std::min(text.size(), N - 1));
    for (std::size_t i = 0; i < std::size(words); ++i) to.words[i].store(words[i], std::memory_order_release);
}

template <class Member>
Table table_at(std::size_t offset, const Member& member) {
    return {static_cast<std::uint32_t>(offset), static_cast<std::uint32_t>(std::size(member))};
}

// Claims memory that other processes may also have received; returns false if a live process is using it.
bool claim_memory(Recording& recording) {
    const auto own = static_cast<std::uint32_t>(getpid());
    std::uint32_t owner = 0;
    while (!recording.header.pid.compare_exchange_strong(owner, own, std::memory_order_acq_rel)) {
        if (owner == own) return true;
        if (kill(static_cast<pid_t>(owner), 0) == 0 || errno != ESRCH) return false;
    }
    if (owner == 0) return true;
    auto* const bytes = reinterpret_cast<std::uint8_t*>(&recording);
    std::memset(bytes, 0, kBytes);
    recording.header.pid.store(own, std::memory_order_release);
    return true;
}

}  // namespace

std::atomic<Recorder*> Recorder::active_{nullptr};
std::atomic<Recorder*> Recorder::paused_{nullptr};

std::uint32_t thread_number() {
    if (this_thread == 0) this_thread = static_cast<std::uint32_t>(syscall(SYS_gettid));
    return this_thread;
}

void set_next_site(std::uint32_t site) {
    next_site = site;
}

bool Recorder::begin(int fd, const ProcessIdentity& identity) {
    static std::mutex beginning;
    const std::lock_guard lock(beginning);
    if (active() != nullptr) return true;
    struct stat status{};
    if (fd >= 0 && fstat(fd, &status) != 0)
        throw std::system_error(errno, std::generic_category(), "fstat of a recording");
    if (fd >= 0 && status.st_size < static_cast<off_t>(kBytes))
        throw std::system_error(EINVAL, std::generic_category(), "the memory of a recording, which is too small");
    const int flags = fd >= 0 ? MAP_SHARED : MAP_PRIVATE | MAP_ANONYMOUS;
    void* const memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, flags, fd, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a recording");
    auto& recording = *static_cast<Recording*>(memory);
    if (!claim_memory(recording)) {
        munmap(memory, kBytes);
        return false;
    }
    auto* const recorder = new Recorder(recording);  // never destroyed
    recorder->describe(identity);
    recorder->calibrate();
    const std::int64_t begun_ns = nanoseconds_of(CLOCK_MONOTONIC);
    while (nanoseconds_of(CLOCK_MONOTONIC) - begun_ns < kFirstPairsNs) {
    }
    recorder->calibrate();  // two pairs are required to compute the tick length
    static std::once_flag once;
    std::call_once(once, [] { pthread_atfork(nullptr, nullptr, &Recorder::detach_in_child); });
    active_.store(recorder, std::memory_order_release);
    return true;
}

void Recorder::pause(bool is_paused) {
    auto& from = is_paused ? active_ : paused_;
    auto& to = is_paused ? paused_ : active_;
    if (Recorder* const moved = from.exchange(nullptr, std::memory_order_acq_rel); moved != nullptr)
        to.store(moved, std::memory_order_release);
}

Recorder::Recorder(Recording& recording) : recording_(recording), calibration_gap_ns_(kFirstGapNs) {}

void Recorder::describe(const ProcessIdentity& identity) {
    Header& to = header();
    to.version = kVersion;
    to.header_bytes = sizeof(Header);
    to.nbytes = kBytes;
    to.pairs = table_at(offsetof(Recording, pairs), recording_.pairs);
    to.names = table_at(offsetof(Recording, names), recording_.names);
    to.groups = table_at(offsetof(Recording, groups), recording_.groups);
    to.calls = table_at(offsetof(Recording, calls), recording_.calls);
    to.events = table_at(offsetof(Recording, events), recording_.events);
    to.links = table_at(offsetof(Recording, links), recording_.links);
    to.rank.store(-1, std::memory_order_relaxed);
    to.clock_kind = static_cast<std::uint32_t>(kClock);
    to.ticks_per_s = ticks_per_second();
    to.time_namespace = identity.time_namespace;
    write_text(to.worker, identity.worker);
    write_text(to.host, identity.host);
    write_text(to.boot, identity.boot);
    to.magic.store(kMagic, std::memory_order_release);
}

void Recorder::identify(int rank, int world_size) {
    header().rank.store(rank, std::memory_order_relaxed);
    header().world_size.store(world_size, std::memory_order_relaxed);
}

void Recorder::finish() {
    calibrate();
    header().flags.fetch_or(kEnded, std::memory_order_release);
}

std::uint32_t Recorder::name(std::string_view text) {
    const std::lock_guard lock(names_mutex_);
    if (const auto found = names_.find(std::string(text)); found != names_.end()) return found->second;
    const std::uint64_t count = header().name_count.load(std::memory_order_relaxed);
    if (count == kNames) return kNames;
    write_text(recording_.names[count], count + 1 < kNames ? text : "(too many names)");
    header().name_count.store(count + 1, std::memory_order_release);
    return names_[std::string(text)] = static_cast<std::uint32_t>(count + 1);
}

std::uint32_t Recorder::open_group(std::string_view name, std::string_view engine, std::uint64_t identity, int rank,
                                   std::span<const int> members) {
    GroupFields fields{};
    fields.size = static_cast<std::uint32_t>(members.size());
    fields.rank = rank;
    fields.name = this->name(name);
    fields.engine = this->name(engine);
    fields.identity = identity;
    fields.opened = ticks();
    if (members.size() <= kMaxMembers) {
        fields.listed = fields.size;
        std::transform(members.begin(), members.end(), fields.members,
                       [](int member) { return static_cast<std::uint16_t>(member); });
    }
    const std::lock_guard lock(groups_mutex_);
    fields.serial = ++groups_;
    for (std::uint32_t i = 0; i < kGroups; ++i) {
        auto& entry = recording_.groups[(fields.serial + i - 1) % kGroups];
        const std::uint64_t old = entry.stamp.load(std::memory_order_relaxed);
        if ((old & kStateMask) != 0) continue;  // an open group's entry is not reused
        const std::uint64_t stamp = std::uint64_t{fields.serial} << kIndexShift | kWriting;
        entry.stamp.store(stamp, std::memory_order_relaxed);
        EntryHandle<sizeof(GroupFields) / sizeof(std::uint64_t)> handle{&entry, stamp};
        fill(entry, fields);
        publish(handle, kOpen);
        open_groups_[fields.serial] = handle;
        break;
    }
    return fields.serial;
}

void Recorder::close_group(std::uint32_t serial) {
    const std::lock_guard lock(groups_mutex_);
    const auto found = open_groups_.find(serial);
    if (found == open_groups_.end()) return;
    auto& handle = found->second;
    if (reopen(handle)) {
        constexpr std::size_t kClosed = offsetof(GroupFields, closed) / sizeof(std::uint64_t);
        handle.entry->words[kClosed].store(ticks(), std::memory_order_release);
        publish(handle, 0);
    }
    open_groups_.erase(found);
}

LinkEntryHandle Recorder::open_link(const LinkFields& fields) {
    const std::lock_guard lock(links_mutex_);
    for (std::uint32_t i = 0; i < kLinks; ++i) {
        const std::uint32_t place = (links_ + i) % kLinks;
        auto& entry = recording_.links[place];
        if ((entry.stamp.load(std::memory_order_relaxed) & kStateMask) != 0) continue;
        links_ += i + 1;
        const std::uint64_t stamp = std::uint64_t{links_} << kIndexShift | kWriting;
        entry.stamp.store(stamp, std::memory_order_relaxed);
        LinkEntryHandle handle{&entry, stamp};
        fill(entry, fields);
        publish(handle, kOpen);
        const std::uint32_t used = header().links_used.load(std::memory_order_relaxed);
        header().links_used.store(std::max(used, place + 1), std::memory_order_release);
        return handle;
    }
    return {};
}

void Recorder::change(LinkEntryHandle& handle, const LinkFields& fields) {
    if (!handle) return;
    reopen_own(handle);
    fill(*handle.entry, fields);
    publish(handle, kOpen);
}

void Recorder::close_link(LinkEntryHandle& handle) {
    if (!handle) return;
    reopen_own(handle);
    publish(handle, 0);
    handle = {};
}

// Updates the latest tick after an entry was recorded; adds a calibration pair if one is due.
void Recorder::update_latest_tick(std::uint64_t tick) {
    // Device times are recorded late and may be older than the latest tick.
    if (tick > header().latest_tick.load(std::memory_order_relaxed))
        header().latest_tick.store(tick, std::memory_order_relaxed);
    if (tick >= next_calibration_.load(std::memory_order_relaxed)) calibrate();
}

// Keeps the first pair and the latest pairs. The gaps between pairs increase; the latest pairs cover at least ten
// minutes.
void Recorder::calibrate() {
    if (calibrating_.test_and_set(std::memory_order_acquire)) return;
    const PairFields now = read_clocks();
    const std::uint64_t count = header().pair_count.load(std::memory_order_relaxed);
    auto& entry = recording_.pairs[count == 0 ? 0 : 1 + (count - 1) % (kPairs - 1)];
    const std::uint64_t stamp = count << kIndexShift | kWriting;
    entry.stamp.store(stamp, std::memory_order_relaxed);
    EntryHandle<sizeof(PairFields) / sizeof(std::uint64_t)> handle{&entry, stamp};
    fill(entry, now);
    publish(handle, 0);
    header().pair_count.store(count + 1, std::memory_order_release);
    const double gap = static_cast<double>(calibration_gap_ns_) * ticks_per_ns(now);
    next_calibration_.store(now.tick + static_cast<std::uint64_t>(gap), std::memory_order_relaxed);
    calibration_gap_ns_ = std::min(2 * calibration_gap_ns_, kMaxGapNs);
    calibrating_.clear(std::memory_order_release);
}

// Returns the counter's average frequency since the first pair, or a default of about 1 GHz if no other pair exists.
double Recorder::ticks_per_ns(const PairFields& now) const {
    std::uint64_t first[sizeof(PairFields) / sizeof(std::uint64_t)];
    PairFields origin = now;
    if (copy(recording_.pairs[0], first)) std::memcpy(&origin, first, sizeof origin);
    const double passed_ns = static_cast<double>(now.monotonic_ns - origin.monotonic_ns);
    return passed_ns > 0 ? static_cast<double>(now.tick - origin.tick) / passed_ns : 1.0;
}

std::uint64_t Recorder::tick_at(std::int64_t monotonic_ns) const {
    const PairFields now = read_clocks();
    const double ago = static_cast<double>(now.monotonic_ns - monotonic_ns) * ticks_per_ns(now);
    return now.tick - static_cast<std::uint64_t>(std::clamp(ago, 0.0, static_cast<double>(now.tick - 1)));
}

CallEntryHandle Recorder::add(CallFields& fields, bool is_over) {
    fields.step = static_cast<std::uint32_t>(header().step.load(std::memory_order_relaxed));
    fields.thread = thread_number();
    fields.site = std::exchange(next_site, 0);
    CallEntryHandle handle = claim(header().calls_begun, recording_.calls);
    if (!handle) return handle;
    fill(*handle.entry, fields);
    publish(handle, is_over ? 0 : kOpen);
    update_latest_tick(fields.ended != 0 ? fields.ended : fields.arrived);
    return handle;
}

void Recorder::change(CallEntryHandle& handle, const CallFields& fields, bool is_over) {
    if (!handle || (handle.stamp & kStateMask) != kOpen) return;
    reopen_own(handle);
    fill_from(*handle.entry, fields, offsetof(CallFields, root) / sizeof(std::uint64_t));
    publish(handle, is_over ? 0 : kOpen);
    update_latest_tick(std::max(fields.started, fields.ended));
}

EventEntryHandle Recorder::add(EventFields fields, bool is_over) {
    fields.step = static_cast<std::uint32_t>(header().step.load(std::memory_order_relaxed));
    fields.thread = thread_number();
    EventEntryHandle handle = claim(header().events_begun, recording_.events);
    if (!handle) return handle;
    fill(*handle.entry, fields);
    publish(handle, is_over ? 0 : kOpen);
    update_latest_tick(std::max(fields.start, fields.end));
    return handle;
}

template <class Change>
void Recorder::change_event(std::uint64_t stamp, bool is_over, Change change) {
    if (stamp == 0) return;
    EventEntryHandle handle{&recording_.events[(stamp >> kIndexShift) % kEvents], stamp};
    // Compares only the index, because `stamp` may belong to an earlier version of the entry.
    const std::uint64_t seen = handle.entry->stamp.load(std::memory_order_relaxed);
    if (seen >> kIndexShift != stamp >> kIndexShift) return;
    handle.stamp = seen;
    if (!reopen(handle)) return;
    const std::uint64_t now = ticks();
    change(*handle.entry, now);
    publish(handle, is_over ? 0 : kOpen);
    update_latest_tick(now);
}

namespace {

constexpr std::size_t word_of(std::size_t offset) {
    return offset / sizeof(std::uint64_t);
}

constexpr std::size_t kEnd = word_of(offsetof(EventFields, end));
constexpr std::size_t kFirst = word_of(offsetof(EventFields, first));
constexpr std::size_t kSecond = word_of(offsetof(EventFields, second));
constexpr std::size_t kSent = word_of(offsetof(EventFields, sent));

}  // namespace

void Recorder::end_event(std::uint64_t stamp) {
    change_event(stamp, true,
                 [](auto& entry, std::uint64_t now) { entry.words[kEnd].store(now, std::memory_order_release); });
}

void Recorder::end_event(std::uint64_t stamp, std::int64_t first, std::int64_t second) {
    change_event(stamp, true, [=](auto& entry, std::uint64_t now) {
        entry.words[kEnd].store(now, std::memory_order_release);
        entry.words[kFirst].store(static_cast<std::uint64_t>(first), std::memory_order_release);
        entry.words[kSecond].store(static_cast<std::uint64_t>(second), std::memory_order_release);
    });
}

void Recorder::end_event_at(std::uint64_t stamp, std::uint64_t tick) {
    change_event(stamp, true,
                 [=](auto& entry, std::uint64_t) { entry.words[kEnd].store(tick, std::memory_order_release); });
}

void Recorder::event_sent(std::uint64_t stamp) {
    change_event(stamp, false,
                 [](auto& entry, std::uint64_t now) { entry.words[kSent].store(now, std::memory_order_release); });
}

// Runs in a forked child and may therefore make only system calls. The child may still hold handles to entries, so the
// memory at the same address must remain writable.
void Recorder::detach_in_child() {
    Recorder* const recorder = active_.load(std::memory_order_relaxed);
    this_thread = 0;
    if (recorder == nullptr) return;
    active_.store(nullptr, std::memory_order_relaxed);
    mmap(&recorder->recording_, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
}

}  // namespace paceline::record
