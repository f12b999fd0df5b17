// The collectives that move data: broadcast, gather, all_gather, scatter and all_to_all.
#include <algorithm>

#include "host/pipeline.hpp"

namespace paceline::host {

bool Group::broadcast(Call& call) {
    if (!begin(call, nullptr, 0)) return false;
    if (size_ == 1) return true;
    ByteStream& tensor = call.outputs[0];
    const Chunks chunks{tensor.nbytes(), slot_bytes_};
    set_stage_bytes(chunks.largest());
    const bool root = rank_ == call.root;
    return pipeline(
        chunks.count(),
        [&](std::size_t chunk, std::uint8_t* slot) {
            if (root) tensor.copy_to(slot, chunks.size(chunk));
        },
        [&](std::size_t chunk, std::uint32_t round) {
            if (!root) tensor.copy_from(slot(call.root, round), chunks.size(chunk));
        });
}

// Runs gather (`receives_result` is true only on the root) and all_gather.
bool Group::gather(Call& call, bool receives_result) {
    if (!begin(call, nullptr, 0)) return false;
    ByteStream& input = call.inputs[0];
    ByteStream own = input;
    const Chunks chunks{input.nbytes(), slot_bytes_};
    set_stage_bytes(chunks.largest());
    const bool stages = call.operation == Operation::all_gather || !receives_result;
    return pipeline(
        chunks.count(),
        [&](std::size_t chunk, std::uint8_t* slot) {
            if (stages) slot_copier_.stage_next(input, slot, chunks.size(chunk));
        },
        [&](std::size_t chunk, std::uint32_t round) {
            if (!receives_result) return;
            for (int r = 0; r < size_; ++r) {
                ByteStream& output = call.outputs[static_cast<std::size_t>(r)];
                if (r == rank_)
                    output.copy_from(own, chunks.size(chunk));
                else
                    output.copy_from(slot(r, round), chunks.size(chunk));
            }
        });
}

bool Group::scatter(Call& call) {
    if (!begin(call, nullptr, 0)) return false;
    ByteStream& output = call.outputs[0];
    const auto ranks = static_cast<std::size_t>(size_);
    const std::size_t chunk_bytes = staged(output.nbytes(), slot_bytes_ / ranks);
    const Chunks chunks{output.nbytes(), chunk_bytes};
    set_stage_bytes(ranks * chunk_bytes);
    const bool root = rank_ == call.root;
    return pipeline(
        chunks.count(),
        [&](std::size_t chunk, std::uint8_t* slot) {
            if (!root) return;
            for (std::size_t r = 0; r < call.inputs.size(); ++r) {
                if (static_cast<int>(r) == rank_)
                    output.copy_from(call.inputs[r], chunks.size(chunk));
                else
                    call.inputs[r].copy_to(slot + r * chunk_bytes, chunks.size(chunk));
            }
        },
        [&](std::size_t chunk, std::uint32_t round) {
            if (!root)
                output.copy_from(slot(call.root, round) + static_cast<std::size_t>(rank_) * chunk_bytes,
                                 chunks.size(chunk));
        });
}

// In the first round every rank publishes the number of bytes that it sends to and expects from each rank, so that all
// ranks can detect a mismatch.
bool Group::all_to_all(Call& call) {
    const auto ranks = static_cast<std::size_t>(size_);
    const std::uint32_t first = round_;
    set_stage_bytes(2 * ranks * sizeof(std::uint64_t));
    auto* table = reinterpret_cast<std::uint64_t*>(slot(rank_, first));
    for (std::size_t r = 0; r < ranks; ++r) {
        table[r] = call.inputs[r].nbytes();
        table[ranks + r] = call.outputs[r].nbytes();
    }
    if (!begin(call, nullptr, 0)) return false;
    std::uint64_t largest = 0;
    for (int from = 0; from < size_; ++from) {
        const auto* sends = reinterpret_cast<const std::uint64_t*>(slot(from, first));
        for (int to = 0; to < size_; ++to) {
            const auto* theirs = reinterpret_cast<const std::uint64_t*>(slot(to, first));
            const std::uint64_t sent = sends[to];
            if (sent != theirs[size_ + from]) {
                outcome_.split_from = from;
                outcome_.split_to = to;
                outcome_.split_sent = sent;
                outcome_.split_expected = theirs[size_ + from];
                return mismatch(first);
            }
            largest = std::max(largest, sent);
        }
    }

    const std::size_t chunk_bytes = staged(largest, slot_bytes_ / ranks);
    const Chunks chunks{largest, chunk_bytes};
    set_stage_bytes(ranks * chunk_bytes);
    const auto size_of = [&](const ByteStream& stream, std::size_t chunk) {
        const std::size_t from = chunk * chunk_bytes;
        return stream.nbytes() <= from ? std::size_t{0} : std::min(chunk_bytes, stream.nbytes() - from);
    };
    return pipeline(
        chunks.count(),
        [&](std::size_t chunk, std::uint8_t* slot) {
            for (std::size_t r = 0; r < ranks; ++r)
                call.inputs[r].copy_to(slot + r * chunk_bytes, size_of(call.inputs[r], chunk));
        },
        [&](std::size_t chunk, std::uint32_t round) {
            for (int r = 0; r < size_; ++r) {
                ByteStream& output = call.outputs[static_cast<std::size_t>(r)];
                output.copy_from(slot(r, round) + static_cast<std::size_t>(rank_) * chunk_bytes,
                                 size_of(output, chunk));
            }
        });
}

}  // namespace paceline::host
