// This process's recorder. All threads write their calls and events into one recording without blocking. The
// recorder is off until `begin` provides memory, and then stays on until the process exits. In a forked child it is
// off: private memory replaces the recording, and writes through the parent's handles have no effect (see
// `Recorder::detach_in_child`).
#pragma once

#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>

#include "record/clock.hpp"
#include "record/entries.hpp"

namespace paceline::record {

using CallEntryHandle = EntryHandle<sizeof(CallFields) / sizeof(std::uint64_t)>;
using EventEntryHandle = EntryHandle<sizeof(EventFields) / sizeof(std::uint64_t)>;
using LinkEntryHandle = EntryHandle<sizeof(LinkFields) / sizeof(std::uint64_t)>;

// The description of a process in its recording.
struct ProcessIdentity {
    std::string worker;
    std::string host;
    std::string boot;
    std::uint64_t time_namespace = 0;
};

class Recorder {
  public:
    // Returns this process's recorder if it is on, otherwise nullptr.
    static Recorder* active() { return active_.load(std::memory_order_acquire); }
    // Starts recording to the file `fd`, whose `kBytes` bytes must stay allocated, or to private memory if `fd` is -1.
    // Takes over the memory of a process that has exited; returns false if a live process is using it. Has no effect if
    // the recorder is on. Throws std::system_error if the memory cannot be mapped.
    static bool begin(int fd, const ProcessIdentity& identity);

    Recorder(const Recorder&) = delete;
    Recorder& operator=(const Recorder&) = delete;
    ~Recorder() = delete;  // threads write until the process exits

    // Pauses or resumes recording, to measure its cost. No entry may be open.
    static void pause(bool is_paused);

    // Records this process's rank and the number of ranks.
    void identify(int rank, int world_size);
    // Records that the process is exiting normally.
    void finish();
    // Returns the number assigned to a name. Names that do not fit in the table share the last number.
    std::uint32_t name(std::string_view text);
    // Converts a CLOCK_MONOTONIC time to ticks. The time must not be before the beginning of the recording.
    std::uint64_t tick_at(std::int64_t monotonic_ns) const;
    void set_step(std::uint64_t step) { header().step.store(step, std::memory_order_relaxed); }

    // Adds a group and returns its serial number. `members[r]` is the global rank of group rank r.
    std::uint32_t open_group(std::string_view name, std::string_view engine, std::uint64_t identity, int rank,
                             std::span<const int> members);
    void close_group(std::uint32_t serial);

    // Records a call that was submitted at `fields.arrived`; `change` records later updates. The entry is not reused
    // until `is_over` is true.
    CallEntryHandle add(CallFields& fields, bool is_over);
    void change(CallEntryHandle& handle, const CallFields& fields, bool is_over);

    EventEntryHandle add(EventFields fields, bool is_over);
    // These functions end the event with this stamp, now or at `tick`, unless the event's entry has been overwritten.
    void end_event(std::uint64_t stamp);
    void end_event_at(std::uint64_t stamp, std::uint64_t tick);
    void end_event(std::uint64_t stamp, std::int64_t first, std::int64_t second);
    // Records the current time as the time at which the event's data was sent.
    void event_sent(std::uint64_t stamp);

    // Allocates an entry for a link's measurements, which `change` writes. After `close_link` the entry remains until
    // another link reuses it. Each link may have only one writer at a time.
    LinkEntryHandle open_link(const LinkFields& fields);
    static void change(LinkEntryHandle& handle, const LinkFields& fields);
    static void close_link(LinkEntryHandle& handle);

  private:
    explicit Recorder(Recording& recording);

    Header& header() const { return recording_.header; }
    void describe(const ProcessIdentity& identity);
    void update_latest_tick(std::uint64_t tick);
    void calibrate();
    double ticks_per_ns(const PairFields& now) const;
    template <class Change>
    void change_event(std::uint64_t stamp, bool is_over, Change change);
    static void detach_in_child();

    static std::atomic<Recorder*> active_;
    static std::atomic<Recorder*> paused_;

    Recording& recording_;
    std::mutex names_mutex_;
    std::unordered_map<std::string, std::uint32_t> names_;
    std::mutex groups_mutex_;
    std::uint32_t groups_ = 0;
    std::mutex links_mutex_;
    std::uint32_t links_ = 0;
    std::unordered_map<std::uint32_t, EntryHandle<sizeof(GroupFields) / sizeof(std::uint64_t)>> open_groups_;
    std::atomic_flag calibrating_;
    std::uint64_t calibration_gap_ns_;                // time until the next pair
    std::atomic<std::uint64_t> next_calibration_{0};  // in ticks
};

// Returns the kernel's id for the calling thread.
std::uint32_t thread_number();

// Sets `CallFields::site` of the call that this thread adds next; later calls have none unless it is set again.
void set_next_site(std::uint32_t site);

}  // namespace paceline::record
