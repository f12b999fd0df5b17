// Runs the data rounds of a call as a pipeline: when a rank waits for round i, it has already published round i + 1.
#pragma once

#include "host/group.hpp"

namespace paceline::host {

// stage(i, slot) fills this rank's slot with part i; consume(i, round) reads part i from the peers' slots.
template <class Stage, class Consume>
bool Group::pipeline(std::size_t parts, Stage stage, Consume consume) {
    const std::uint32_t first = round_;
    const auto show = [&](std::size_t part) {
        copying_.timed([&] { stage(part, slot(rank_, round_)); });
        publish(round_);
        ++round_;
    };
    if (parts != 0) show(0);
    for (std::size_t part = 0; part < parts; ++part) {
        if (part + 1 < parts) show(part + 1);
        const std::uint32_t round = first + static_cast<std::uint32_t>(part);
        if (!await(round)) return false;
        copying_.timed([&] { consume(part, round); });
    }
    return true;
}

// A number of bytes divided into parts of at most `part_bytes`.
struct Parts {
    std::size_t nbytes;
    std::size_t part_bytes;

    std::size_t count() const { return (nbytes + part_bytes - 1) / part_bytes; }
    std::size_t largest() const { return nbytes < part_bytes ? nbytes : part_bytes; }
    std::size_t size(std::size_t part) const {
        const std::size_t rest = nbytes - part * part_bytes;
        return rest < part_bytes ? rest : part_bytes;
    }
};

}  // namespace paceline::host
