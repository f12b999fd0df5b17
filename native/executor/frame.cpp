#include "executor/frame.hpp"

#include <algorithm>
#include <cstring>
#include <type_traits>

namespace paceline::executor {
namespace {

constexpr std::uint32_t kMaxListed = 1024;  // maximum length of each list in a failure report
// A failure report contains five lists of ranks and one list of calls.
static_assert(kMaxListed * (5 * sizeof(int) + sizeof(CallHeader)) + 128 <= kMaxFailureBytes);
static_assert(kMaxListed * sizeof(AwaitedRank) + 128 <= kMaxFailureBytes);

class Writer {
  public:
    template <class T>
    void put(const T& value) {
        static_assert(std::is_trivially_copyable_v<T>);
        const auto* from = reinterpret_cast<const std::uint8_t*>(&value);
        bytes.insert(bytes.end(), from, from + sizeof value);
    }
    template <class T>
    void put_list(const std::vector<T>& values) {
        const auto n = static_cast<std::uint32_t>(values.size() < kMaxListed ? values.size() : kMaxListed);
        put(n);
        for (std::uint32_t i = 0; i < n; ++i) put(values[i]);
    }

    std::vector<std::uint8_t> bytes;
};

class Reader {
  public:
    explicit Reader(std::span<const std::uint8_t> bytes) : bytes_(bytes) {}

    template <class T>
    bool get(T& value) {
        if (bytes_.size() < sizeof value) return false;
        std::memcpy(&value, bytes_.data(), sizeof value);
        bytes_ = bytes_.subspan(sizeof value);
        return true;
    }
    template <class T>
    bool get_list(std::vector<T>& values) {
        std::uint32_t n = 0;
        if (!get(n) || n > kMaxListed || bytes_.size() < n * sizeof(T)) return false;
        values.resize(n);
        for (T& value : values)
            if (!get(value)) return false;
        return true;
    }

  private:
    std::span<const std::uint8_t> bytes_;
};

bool are_ranks(const std::vector<int>& ranks, int size) {
    for (const int rank : ranks)
        if (rank < 0 || rank >= size) return false;
    return true;
}

// Returns true if this code is a valid reason for a rank to break a group.
bool is_failure(OutcomeCode code) {
    return code == OutcomeCode::mismatch || code == OutcomeCode::timed_out || code == OutcomeCode::peer_lost ||
           code == OutcomeCode::interrupted || code == OutcomeCode::aborted;
}

// Returns true if the outcome contains all data required for its error message.
bool is_complete(const Outcome& outcome, int size) {
    const std::size_t calls = std::min(static_cast<std::size_t>(size), std::size_t{kMaxListed});
    switch (outcome.code) {
        case OutcomeCode::mismatch:
            return outcome.calls.size() == calls && (outcome.split_from < 0) == (outcome.split_to < 0);
        case OutcomeCode::timed_out:
            return outcome.calls.empty() || outcome.calls.size() == calls;
        case OutcomeCode::peer_lost:
            return !outcome.gone.empty();
        default:
            return true;
    }
}

}  // namespace

std::vector<std::uint8_t> encode(const Outcome& outcome) {
    Writer writer;
    writer.put(static_cast<std::uint32_t>(outcome.code));
    writer.put(outcome.reporter);
    writer.put(outcome.waited_ns);
    writer.put(outcome.split_from);
    writer.put(outcome.split_to);
    writer.put(outcome.split_sent);
    writer.put(outcome.split_expected);
    writer.put_list(outcome.missing);
    writer.put(static_cast<std::uint8_t>(outcome.has_begun));
    writer.put_list(outcome.gone);
    writer.put_list(outcome.left);
    writer.put_list(outcome.waiting);
    writer.put_list(outcome.blocked_by);
    writer.put_list(outcome.calls);
    writer.put(outcome.cause.pack());
    return std::move(writer.bytes);
}

std::optional<Outcome> decode(std::span<const std::uint8_t> bytes, int size) {
    Reader reader(bytes);
    Outcome outcome;
    std::uint32_t code = 0;
    std::uint8_t has_begun = 0;
    std::uint32_t cause = 0;
    const bool whole = reader.get(code) && reader.get(outcome.reporter) && reader.get(outcome.waited_ns) &&
                       reader.get(outcome.split_from) && reader.get(outcome.split_to) &&
                       reader.get(outcome.split_sent) && reader.get(outcome.split_expected) &&
                       reader.get_list(outcome.missing) && reader.get(has_begun) && reader.get_list(outcome.gone) &&
                       reader.get_list(outcome.left) && reader.get_list(outcome.waiting) &&
                       reader.get_list(outcome.blocked_by) && reader.get_list(outcome.calls) && reader.get(cause);
    outcome.code = static_cast<OutcomeCode>(code);
    if (!whole || !is_failure(outcome.code)) return std::nullopt;
    outcome.has_begun = has_begun != 0;
    outcome.cause = FailureCause::unpack(cause);
    const bool sound = are_ranks(outcome.missing, size) && are_ranks(outcome.gone, size) &&
                       are_ranks(outcome.left, size) && are_ranks(outcome.waiting, size) && outcome.reporter >= 0 &&
                       outcome.reporter < size && outcome.split_from >= -1 && outcome.split_from < size &&
                       outcome.split_to >= -1 && outcome.split_to < size &&
                       outcome.calls.size() <= static_cast<std::size_t>(size) && is_complete(outcome, size);
    if (!sound) return std::nullopt;
    for (const CallHeader& call : outcome.calls)
        if (!is_valid(call)) return std::nullopt;
    return outcome;
}

std::vector<std::uint8_t> encode(const Answer& answer) {
    Writer writer;
    writer.put_list(answer.awaited);
    return std::move(writer.bytes);
}

std::optional<Answer> decode_answer(const Frame& frame, std::span<const std::uint8_t> bytes) {
    Answer answer{static_cast<Answer::Kind>(frame.tag), {}};
    if (answer.kind < Answer::Kind::waiting || answer.kind > Answer::Kind::completed) return std::nullopt;
    if (!Reader(bytes).get_list(answer.awaited)) return std::nullopt;
    return answer;
}

bool is_valid(const Frame& frame) {
    if (frame.magic != Frame::kMagic || frame.kind < FrameKind::eager || frame.kind > FrameKind::answer) return false;
    if (frame.dtype > DType::c32) return false;
    if (frame.kind == FrameKind::waiting) return frame.nbytes == sizeof(CallHeader);
    if (frame.kind == FrameKind::failure || frame.kind == FrameKind::answer) return frame.nbytes <= kMaxFailureBytes;
    return true;
}

}  // namespace paceline::executor
