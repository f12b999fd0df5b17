#include "simulate/rank_progress.hpp"

#include <algorithm>
#include <utility>

#include "wire/wire.hpp"

namespace paceline::simulate {

using executor::Buffer;
using executor::Dependency;
using executor::Schedule;
using executor::Slice;
using executor::Step;
using executor::StepKind;

RankProgress::RankProgress(std::shared_ptr<const Schedule> schedule, double block_nbytes)
    : schedule_(std::move(schedule)),
      packed_(static_cast<double>(packed_group(schedule_->wire)) / (kWireGroup * sizeof(float))),
      states_(schedule_->steps.size()),
      open_(states_.size()) {
    for (std::uint32_t step = 0; step < states_.size(); ++step) place_step(step, block_nbytes);
    find_dependents();
}

void RankProgress::place_step(std::uint32_t number, double block_nbytes) {
    const Step& step = schedule_->steps[number];
    SimulatedStep& state = states_[number];
    const auto block = [&](const Slice& slice) {
        return slice.buffer == Buffer::wire ? block_nbytes * packed_ : block_nbytes;
    };
    const bool packs = step.kind == StepKind::pack;
    const Slice& measured = step.writes() && !packs ? step.dst : step.src;
    state.src_offset = step.src.first * block(step.src);
    state.dst_offset = step.dst.first * block(step.dst);
    state.nbytes = measured.length == 0 ? 1 : measured.length * block(measured);
}

// Computes the followers of each step by inverting the dependencies.
void RankProgress::find_dependents() {
    dependents_from_.assign(states_.size() + 1, 0);
    for (const Dependency& on : schedule_->all_dependencies) ++dependents_from_[on.step + 1];
    for (std::size_t i = 1; i < dependents_from_.size(); ++i) dependents_from_[i] += dependents_from_[i - 1];
    dependents_.resize(schedule_->all_dependencies.size());
    std::vector<std::uint32_t> filled(dependents_from_.begin(), dependents_from_.end() - 1);
    for (std::uint32_t step = 0; step < states_.size(); ++step)
        for (const Dependency& on : schedule_->dependencies(step)) dependents_[filled[on.step]++] = step;
}

std::span<const std::uint32_t> RankProgress::dependents(std::uint32_t step) const {
    return std::span(dependents_).subspan(dependents_from_[step], dependents_from_[step + 1] - dependents_from_[step]);
}

bool RankProgress::all_received_before(std::uint32_t step) const {
    for (std::uint32_t earlier = 0; earlier < step; ++earlier)
        if (schedule_->steps[earlier].kind != StepKind::send && !states_[earlier].is_finished) return false;
    return true;
}

RankProgress::Operand RankProgress::operand(std::uint32_t number, bool dst) const {
    const SimulatedStep& state = states_[number];
    const Step& step = schedule_->steps[number];
    const bool is_packed = executor::converts(step.kind) && dst == (step.kind == StepKind::pack);
    const double scale = is_packed ? packed_ : 1;
    return {dst ? state.dst_offset : state.src_offset, state.nbytes * scale, state.done * scale, scale};
}

std::optional<double> RankProgress::limit(std::uint32_t number) const {
    const SimulatedStep& state = states_[number];
    const Step& step = schedule_->steps[number];
    if (step.kind == StepKind::send && step.src.length == 0)
        return all_received_before(number) ? std::optional(state.nbytes) : std::nullopt;
    double max_rate = state.nbytes;
    for (const Dependency& on : schedule_->dependencies(number)) {
        if (states_[on.step].is_finished) continue;
        const Operand other = operand(on.step, on.earlier_dst);
        const Operand mine = operand(number, on.later_dst);
        const double front = other.offset + other.done;
        const double end = std::min(other.offset + other.nbytes, mine.offset + mine.nbytes);
        if (front >= end - kMinBytes) continue;
        const double at = std::max(front, std::max(other.offset, mine.offset)) - mine.offset;
        max_rate = std::min(max_rate, at / mine.scale);
    }
    if (max_rate <= state.done + kMinBytes && max_rate < state.nbytes) return std::nullopt;
    return max_rate;
}

double RankProgress::ahead(std::span<const std::uint32_t> numbers, std::size_t at, double max_rate) const {
    double found = 0;
    for (; at < numbers.size() && found < max_rate; ++at) {
        const std::optional<double> may = limit(numbers[at]);
        if (!may) break;
        found += *may - states_[numbers[at]].done;
        const bool goes_on = at + 1 < numbers.size() && numbers[at + 1] == numbers[at] + 1;
        if (!goes_on || *may < states_[numbers[at]].nbytes - kMinBytes) break;
    }
    return std::min(found, max_rate);
}

bool RankProgress::advance(std::uint32_t number, double nbytes) {
    SimulatedStep& state = states_[number];
    state.done += nbytes;
    if (state.done < state.nbytes - kMinBytes) return false;
    state.done = state.nbytes;
    state.is_finished = true;
    --open_;
    return true;
}

}  // namespace paceline::simulate
