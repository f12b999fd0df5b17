// Runs the data rounds of a call as a pipeline: when a rank waits for round i, it has already published round i + 1.
#pragma once

#include "host/group.hpp"

namespace paceline::host {

// stage(i, slot) fills this rank's slot with part i; consume(i, round) reads part i from the peers' slots.
template <class Stage, class Consume>
bool Group::pipeline(std::size_t chunks, Stage stage, Consume consume) {
    const std::uint32_t first = round_;
    const auto publish_chunk = [&](std::size_t chunk) {
        slot_copier_.timed([&] { stage(chunk, slot(rank_, round_)); });
        publish(round_);
        ++round_;
    };
    if (chunks != 0) publish_chunk(0);
    for (std::size_t chunk = 0; chunk < chunks; ++chunk) {
        if (chunk + 1 < chunks) publish_chunk(chunk + 1);
        const std::uint32_t round = first + static_cast<std::uint32_t>(chunk);
        if (!await(round)) return false;
        slot_copier_.timed([&] { consume(chunk, round); });
    }
    return true;
}

// A number of bytes divided into parts of at most `chunk_bytes`.
struct Chunks {
    std::size_t nbytes;
    std::size_t chunk_bytes;

    std::size_t count() const { return (nbytes + chunk_bytes - 1) / chunk_bytes; }
    std::size_t largest() const { return nbytes < chunk_bytes ? nbytes : chunk_bytes; }
    std::size_t size(std::size_t chunk) const {
        const std::size_t rest = nbytes - chunk * chunk_bytes;
        return rest < chunk_bytes ? rest : chunk_bytes;
    }
};

}  // namespace paceline::host
