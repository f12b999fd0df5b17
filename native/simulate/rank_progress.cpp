#include "simulate/rank_progress.hpp"

#include <algorithm>
#include <utility>

#include "wire/wire.hpp"

namespace paceline::simulate {

using executor::Buffer;
using executor::Dependency;
using executor::Kind;
using executor::Schedule;
using executor::Slice;
using executor::Step;

RankProgress::RankProgress(std::shared_ptr<const Schedule> schedule, double block_nbytes)
    : schedule_(std::move(schedule)),
      packed_(static_cast<double>(packed_group(schedule_->wire)) / (kWireGroup * sizeof(float))),
      states_(schedule_->steps.size()),
      open_(states_.size()) {
    for (std::uint32_t step = 0; step < states_.size(); ++step) place(step, block_nbytes);
    find_followers();
}

void RankProgress::place(std::uint32_t number, double block_nbytes) {
    const Step& step = schedule_->steps[number];
    StepState& state = states_[number];
    const auto block = [&](const Slice& slice) {
        return slice.buffer == Buffer::wire ? block_nbytes * packed_ : block_nbytes;
    };
    const bool packs = step.kind == Kind::pack;
    const Slice& measured = step.writes() && !packs ? step.dst : step.src;
    state.src_offset = step.src.first * block(step.src);
    state.dst_offset = step.dst.first * block(step.dst);
    state.nbytes = measured.length == 0 ? 1 : measured.length * block(measured);
}

// Computes the followers of each step by inverting the dependencies.
void RankProgress::find_followers() {
    followers_from_.assign(states_.size() + 1, 0);
    for (const Dependency& on : schedule_->all_dependencies) ++followers_from_[on.step + 1];
    for (std::size_t i = 1; i < followers_from_.size(); ++i) followers_from_[i] += followers_from_[i - 1];
    followers_.resize(schedule_->all_dependencies.size());
    std::vector<std::uint32_t> filled(followers_from_.begin(), followers_from_.end() - 1);
    for (std::uint32_t step = 0; step < states_.size(); ++step)
        for (const Dependency& on : schedule_->dependencies(step)) followers_[filled[on.step]++] = step;
}

std::span<const std::uint32_t> RankProgress::followers(std::uint32_t step) const {
    return std::span(followers_).subspan(followers_from_[step], followers_from_[step + 1] - followers_from_[step]);
}

bool RankProgress::all_received_before(std::uint32_t step) const {
    for (std::uint32_t earlier = 0; earlier < step; ++earlier)
        if (schedule_->steps[earlier].kind != Kind::send && !states_[earlier].is_finished) return false;
    return true;
}

RankProgress::Side RankProgress::side(std::uint32_t number, bool dst) const {
    const StepState& state = states_[number];
    const Step& step = schedule_->steps[number];
    const bool is_packed = executor::converts(step.kind) && dst == (step.kind == Kind::pack);
    const double scale = is_packed ? packed_ : 1;
    return {dst ? state.dst_offset : state.src_offset, state.nbytes * scale, state.done * scale, scale};
}

std::optional<double> RankProgress::limit(std::uint32_t number) const {
    const StepState& state = states_[number];
    const Step& step = schedule_->steps[number];
    if (step.kind == Kind::send && step.src.length == 0)
        return all_received_before(number) ? std::optional(state.nbytes) : std::nullopt;
    double most = state.nbytes;
    for (const Dependency& on : schedule_->dependencies(number)) {
        if (states_[on.step].is_finished) continue;
        const Side other = side(on.step, on.earlier_dst);
        const Side mine = side(number, on.later_dst);
        const double front = other.offset + other.done;
        const double end = std::min(other.offset + other.nbytes, mine.offset + mine.nbytes);
        if (front >= end - kSliver) continue;
        const double at = std::max(front, std::max(other.offset, mine.offset)) - mine.offset;
        most = std::min(most, at / mine.scale);
    }
    if (most <= state.done + kSliver && most < state.nbytes) return std::nullopt;
    return most;
}

double RankProgress::ahead(std::span<const std::uint32_t> numbers, std::size_t at, double most) const {
    double found = 0;
    for (; at < numbers.size() && found < most; ++at) {
        const std::optional<double> may = limit(numbers[at]);
        if (!may) break;
        found += *may - states_[numbers[at]].done;
        const bool goes_on = at + 1 < numbers.size() && numbers[at + 1] == numbers[at] + 1;
        if (!goes_on || *may < states_[numbers[at]].nbytes - kSliver) break;
    }
    return std::min(found, most);
}

bool RankProgress::advance(std::uint32_t number, double nbytes) {
    StepState& state = states_[number];
    state.done += nbytes;
    if (state.done < state.nbytes - kSliver) return false;
    state.done = state.nbytes;
    state.is_finished = true;
    --open_;
    return true;
}

}  // namespace paceline::simulate
