#include "executor/schedule.hpp"

#include <algorithm>
#include <array>
#include <map>

namespace paceline::executor {
namespace {

constexpr std::size_t kNumbersPerStep = 9;
constexpr std::uint32_t kMaxBlocks = 1 << 20;

// The step that last wrote a block, and the steps that have read it since then.
struct BlockAccess {
    std::int64_t writer = -1;
    std::vector<std::uint32_t> readers;
};

bool to_slice(const std::int32_t* numbers, Slice& slice) {
    if (numbers[0] < 0 || numbers[0] > 3 || numbers[1] < 0 || numbers[2] < 0) return false;
    slice = {static_cast<Buffer>(numbers[0]), static_cast<std::uint32_t>(numbers[1]),
             static_cast<std::uint32_t>(numbers[2])};
    return slice.first <= kMaxBlocks && slice.length <= kMaxBlocks;
}

// Sends and receives transfer packed blocks unchanged. Only conversions read or write the contents of packed blocks,
// one block per step.
bool uses_wire_well(const Step& step) {
    const bool from = step.reads() && step.src.buffer == Buffer::wire;
    const bool to = step.writes() && step.dst.buffer == Buffer::wire;
    if ((from && step.src.length != 1) || (to && step.dst.length != 1)) return false;
    if (!converts(step.kind)) return !(from || to) || step.kind == StepKind::send || step.kind == StepKind::recv;
    return step.dst.length == 1 && (step.kind == StepKind::pack ? to && !from : from && !to);
}

bool to_step(const std::int32_t* numbers, int rank, int size, Step& step) {
    if (numbers[0] < 0 || numbers[0] > 6 || !to_slice(numbers + 3, step.dst) || !to_slice(numbers + 6, step.src))
        return false;
    step.kind = static_cast<StepKind>(numbers[0]);
    step.final = numbers[1] != 0;
    step.peer = numbers[2];
    if (is_local(step.kind) ? step.peer != -1 : (step.peer < 0 || step.peer >= size || step.peer == rank)) return false;
    const bool two = step.reads() && step.writes();
    if (two && step.dst.length != step.src.length) return false;
    return uses_wire_well(step) && (step.kind == StepKind::send || step.dst.buffer != Buffer::input);
}

class DependencyFinder {
  public:
    void add(const Step& step, std::uint32_t number, std::vector<Dependency>& found) {
        const std::size_t from = found.size();
        const bool reads = step.reads();
        const bool writes = step.writes();
        if (reads && step.src.buffer != Buffer::input) {
            each_block(step.src, [&](BlockAccess& block) {
                if (block.writer >= 0) found.push_back({static_cast<std::uint32_t>(block.writer), true, false});
            });
        }
        if (writes) {
            each_block(step.dst, [&](BlockAccess& block) {
                if (block.writer >= 0) found.push_back({static_cast<std::uint32_t>(block.writer), true, true});
                for (const std::uint32_t reader : block.readers) found.push_back({reader, false, true});
            });
        }
        if (reads && step.src.buffer != Buffer::input)
            each_block(step.src, [&](BlockAccess& block) { block.readers.push_back(number); });
        if (writes) {
            each_block(step.dst, [&](BlockAccess& block) {
                block.writer = number;
                block.readers.clear();
            });
        }
        const auto key = [](const Dependency& d) {
            return std::uint64_t{d.step} << 2 | std::uint64_t{d.earlier_dst} << 1 | std::uint64_t{d.later_dst};
        };
        const auto begin = found.begin() + static_cast<std::ptrdiff_t>(from);
        std::sort(begin, found.end(), [&](const auto& a, const auto& b) { return key(a) < key(b); });
        found.erase(std::unique(begin, found.end(), [&](const auto& a, const auto& b) { return key(a) == key(b); }),
                    found.end());
    }

  private:
    template <class Visit>
    void each_block(const Slice& slice, Visit visit) {
        std::vector<BlockAccess>& blocks = buffers_[static_cast<std::size_t>(slice.buffer)];
        if (blocks.size() < slice.first + slice.length) blocks.resize(slice.first + slice.length);
        for (std::uint32_t b = slice.first; b < slice.first + slice.length; ++b) visit(blocks[b]);
    }

    std::array<std::vector<BlockAccess>, kBuffers> buffers_;
};

}  // namespace

std::shared_ptr<const Schedule> Schedule::make(std::uint8_t algorithm, std::uint32_t blocks, int rank, int size,
                                               std::span<const std::int32_t> flat, std::size_t* bad_step,
                                               WireType wire) {
    if (bad_step != nullptr) *bad_step = 0;
    if (flat.size() % kNumbersPerStep != 0 || blocks > kMaxBlocks || rank < 0 || rank >= size) return nullptr;
    auto schedule = std::make_shared<Schedule>();
    schedule->algorithm = algorithm;
    schedule->blocks = blocks;
    schedule->rank = rank;
    schedule->size = size;
    schedule->wire = wire;
    schedule->steps.resize(flat.size() / kNumbersPerStep);
    std::map<int, std::size_t> flow_of;
    DependencyFinder finder;
    for (std::uint32_t number = 0; number < schedule->steps.size(); ++number) {
        Step& step = schedule->steps[number];
        if (bad_step != nullptr) *bad_step = number;
        if (!to_step(flat.data() + number * kNumbersPerStep, rank, size, step)) return nullptr;
        for (const Slice* slice : {&step.dst, &step.src}) {
            const std::uint32_t end = slice->first + slice->length;
            if (slice->buffer == Buffer::scratch) schedule->scratch_blocks = std::max(schedule->scratch_blocks, end);
            if (slice->buffer == Buffer::wire) schedule->wire_blocks = std::max(schedule->wire_blocks, end);
        }
        if (schedule->wire_blocks != 0 && wire == WireType::none) return nullptr;
        schedule->dependencies_from.push_back(static_cast<std::uint32_t>(schedule->all_dependencies.size()));
        finder.add(step, number, schedule->all_dependencies);
        if (is_local(step.kind)) {
            schedule->local.push_back(number);
            continue;
        }
        const auto [place, is_new] = flow_of.try_emplace(step.peer, schedule->flows.size());
        if (is_new) schedule->flows.push_back({step.peer, {}, {}});
        Flow& flow = schedule->flows[place->second];
        (step.kind == StepKind::send ? flow.sends : flow.receives).push_back(number);
    }
    schedule->dependencies_from.push_back(static_cast<std::uint32_t>(schedule->all_dependencies.size()));
    return schedule;
}

}  // namespace paceline::executor
