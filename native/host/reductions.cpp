// The reductions: all_reduce, reduce and reduce_scatter. Small tensors are passed in the cells. For larger tensors,
// every rank stages one slot's worth of data per round. With two ranks, both reduce all staged data ("flat"). With more
// ranks, each rank reduces one slice and collects the other slices one round later ("in slices"). If the ranks span
// several NUMA nodes or caches, the ranks of each node or cache first reduce among themselves ("in blocks"). An
// all_reduce with a separate input does not modify it; the rank contributes its staged copy.
#include <algorithm>

#include "call/poll_interval.hpp"
#include "host/pipeline.hpp"

namespace paceline::host {
namespace {

constexpr std::size_t kSlicesFrom = 32 << 10;  // bytes below which one round over all data is faster
constexpr std::size_t kTile = 32 << 10;       // bytes of each rank's tensor to reduce at a time, which fit in the cache
constexpr std::size_t kUpdateTile = 8 << 10;  // bytes of results to update at a time, which fit in the L1 cache

struct Slice {
    std::size_t from = 0, nbytes = 0;
};

// A tensor divided into parts of `count` slices each. A part fits in a slot together with `extra` slices from other
// parts.
struct Slices {
    Slices(std::size_t nbytes, std::size_t slot_bytes, std::size_t count, std::size_t extra)
        : slices(count), chunks{nbytes, staged(nbytes, (slot_bytes - extra * kLine) / (count + extra) * count)} {}

    Slice of(std::size_t chunk, std::size_t slice) const {
        const std::size_t nbytes = chunks.size(chunk);
        const std::size_t each = in_lines((nbytes + slices - 1) / slices);
        const std::size_t from = each * slice < nbytes ? each * slice : nbytes;
        return {from, nbytes - from < each ? nbytes - from : each};
    }
    // Returns the offset in a slot of the extra slice with this number (0 or 1).
    std::size_t after(std::size_t number) const {
        return chunks.chunk_bytes + number * in_lines((chunks.chunk_bytes + slices - 1) / slices);
    }

    std::size_t slices;
    Chunks chunks;
};

// Returns this rank's contribution to a reduction with one output.
const ByteStream& contribution(const Call& call) {
    return call.inputs.empty() ? call.outputs[0] : call.inputs[0];
}

}  // namespace

bool Group::all_reduce(Call& call) {
    const std::size_t nbytes = call.outputs[0].nbytes();
    if (nbytes <= kInline) return all_reduce_inline(call);
    if (nbytes <= slot_bytes_ && (size_ == 2 || nbytes < kSlicesFrom)) return all_reduce_in_one_round(call);
    const std::uint32_t first = round_;
    if (!begin(call, nullptr, 0)) return false;
    if (size_ == 1) {
        if (!call.inputs.empty()) call.outputs[0].copy_from(call.inputs[0], nbytes);
        return true;
    }
    if (call.region != 0) {
        bool all_shared = true;
        for (int r = 0; r < size_; ++r) all_shared = all_shared && cell(r, first).header.shared != 0;
        if (all_shared) return all_reduce_shared(call, first);
    }
    return size_ > 2 && nbytes >= kSlicesFrom ? reduce_large(call, true) : reduce_flat(call, true);
}

bool Group::all_reduce_inline(Call& call) {
    ByteStream& tensor = call.outputs[0];
    const std::size_t nbytes = tensor.nbytes();
    alignas(16) std::uint8_t mine[kInline];
    contribution(call).peek_to(mine, nbytes);
    const std::uint32_t round = round_;
    if (!begin(call, mine, nbytes)) return false;
    for (int r = 0; r < size_; ++r) sources_[static_cast<std::size_t>(r)] = cell(r, round).payload;
    alignas(16) std::uint8_t sum[kInline];
    if (nbytes != 0)
        find_reduction(call.dtype, call.reduce_op)(sum, sources_.data(), size_, nbytes / item_size(call.dtype), size_);
    tensor.copy_from(sum, nbytes);
    return true;
}

bool Group::all_reduce_in_one_round(Call& call) {
    ByteStream& tensor = call.outputs[0];
    const std::size_t nbytes = tensor.nbytes();
    const std::uint32_t round = round_;
    set_stage_bytes(nbytes);
    slot_copier_.timed([&] { slot_copier_.stage(contribution(call), slot(rank_, round), nbytes); });
    if (!begin(call, nullptr, 0)) return false;
    slot_copier_.timed([&] { reduce_out_of_slots(call, tensor, nbytes, round); });
    return true;
}

// Reduces this rank's contribution (`tensor` itself, or its copy in this rank's slot) with the peers' slots into the
// next `nbytes` of `tensor`.
void Group::reduce_out_of_slots(const Call& call, ByteStream& tensor, std::size_t nbytes, std::uint32_t round) {
    const std::size_t item = item_size(call.dtype);
    const ReduceFn kernel = find_reduction(call.dtype, call.reduce_op);
    const bool in_place = call.inputs.empty();
    tensor.next(nbytes, [&](std::uint8_t* data, std::size_t n, std::size_t done) {
        for (int r = 0; r < size_; ++r)
            sources_[static_cast<std::size_t>(r)] = in_place && r == rank_ ? data : slot(r, round) + done;
        kernel(data, sources_.data(), size_, n / item, size_);
    });
}

bool Group::reduce(Call& call) {
    const std::size_t nbytes = call.outputs[0].nbytes();
    if (!begin(call, nullptr, 0)) return false;
    if (size_ == 1) return true;
    const bool receives_result = rank_ == call.root;
    return size_ > 2 && nbytes >= kSlicesFrom ? reduce_large(call, receives_result)
                                              : reduce_flat(call, receives_result);
}

bool Group::reduce_flat(Call& call, bool receives_result) {
    ByteStream& tensor = call.outputs[0];
    ByteStream input = contribution(call);
    // Data that would fit in one large part is divided into several parts, so that one part can be reduced while the
    // next one is staged.
    const Chunks chunks{tensor.nbytes(), tensor.nbytes() > slot_capacity_ ? slot_capacity_ : slot_bytes_};
    const bool stages = call.operation != Operation::reduce || !receives_result;
    set_stage_bytes(chunks.largest());
    return pipeline(
        chunks.count(),
        [&](std::size_t chunk, std::uint8_t* slot) {
            if (stages) slot_copier_.stage_next(input, slot, chunks.size(chunk));
        },
        [&](std::size_t chunk, std::uint32_t round) {
            if (receives_result) reduce_out_of_slots(call, tensor, chunks.size(chunk), round);
        });
}

bool Group::reduce_large(Call& call, bool receives_result) {
    // Sums of these dtypes must be rounded only once (reduce.hpp), but a reduction in blocks would also round the sum
    // of each block.
    const bool in_blocks = block_ != 0 && call.dtype != DType::f16 && call.dtype != DType::bf16;
    return in_blocks ? reduce_in_blocks(call, receives_result) : reduce_in_slices(call, receives_result);
}

// In round j, a slot contains part j followed by this rank's reduced slice of part j - 1.
bool Group::reduce_in_slices(Call& call, bool receives_result) {
    ByteStream& tensor = call.outputs[0];
    ByteStream input = contribution(call);
    const Slices slices(tensor.nbytes(), slot_bytes_, static_cast<std::size_t>(size_), 1);
    set_stage_bytes(slices.after(1));
    const std::size_t item = item_size(call.dtype);
    const ReduceFn kernel = find_reduction(call.dtype, call.reduce_op);
    for (std::size_t chunk = 0; chunk <= slices.chunks.count(); ++chunk) {
        const std::uint32_t round = round_++;
        if (chunk < slices.chunks.count())
            slot_copier_.timed([&] { slot_copier_.stage_next(input, slot(rank_, round), slices.chunks.size(chunk)); });
        publish(round);
        if (!await(round)) return false;
        slot_copier_.timed([&] {
            if (chunk < slices.chunks.count()) {
                const Slice mine = slices.of(chunk, static_cast<std::size_t>(rank_));
                for (int r = 0; r < size_; ++r) sources_[static_cast<std::size_t>(r)] = slot(r, round) + mine.from;
                if (mine.nbytes != 0)
                    kernel(slot(rank_, round + 1) + slices.after(0), sources_.data(), size_, mine.nbytes / item, size_);
            }
            if (chunk > 0 && receives_result)
                for (int r = 0; r < size_; ++r)
                    tensor.copy_from(slot(r, round) + slices.after(0),
                                     slices.of(chunk - 1, static_cast<std::size_t>(r)).nbytes);
        });
    }
    return true;
}

// In round j, a slot contains three things: part j; this rank's slice of part j - 1, reduced over the rank's block; and
// its slice of part j - 2, reduced over all blocks. Data moves between blocks only when ranks at the same position in
// their blocks exchange slices. comm/schedule/hierarchical.py implements the same algorithm as a schedule.
bool Group::reduce_in_blocks(Call& call, bool receives_result) {
    ByteStream& tensor = call.outputs[0];
    ByteStream input = contribution(call);
    const Slices slices(tensor.nbytes(), slot_bytes_, block_, 2);
    set_stage_bytes(slices.after(2));
    const std::size_t chunks = slices.chunks.count();
    const std::size_t item = item_size(call.dtype);
    const ReduceFn last = find_reduction(call.dtype, call.reduce_op);
    const ReduceFn first = call.reduce_op == ReduceOp::avg ? find_reduction(call.dtype, ReduceOp::sum) : last;
    const auto rank = static_cast<std::size_t>(rank_);
    const std::size_t place = rank % block_;
    const auto at = [&](std::size_t block, std::size_t in_block, std::uint32_t round) {
        return slot(static_cast<int>(block * block_ + in_block), round);
    };
    const std::size_t blocks = static_cast<std::size_t>(size_) / block_;
    for (std::size_t chunk = 0; chunk < chunks + 2; ++chunk) {
        const std::uint32_t round = round_++;
        if (chunk < chunks)
            slot_copier_.timed([&] { slot_copier_.stage_next(input, slot(rank_, round), slices.chunks.size(chunk)); });
        publish(round);
        if (!await(round)) return false;
        std::uint8_t* const next = slot(rank_, round + 1);
        slot_copier_.timed([&] {
            if (const Slice mine = chunk < chunks ? slices.of(chunk, place) : Slice{}; mine.nbytes != 0) {
                for (std::size_t i = 0; i < block_; ++i) sources_[i] = at(rank / block_, i, round) + mine.from;
                first(next + slices.after(0), sources_.data(), static_cast<int>(block_), mine.nbytes / item, size_);
            }
            if (const Slice mine = chunk >= 1 && chunk <= chunks ? slices.of(chunk - 1, place) : Slice{};
                mine.nbytes != 0) {
                for (std::size_t i = 0; i < blocks; ++i) sources_[i] = at(i, place, round) + slices.after(0);
                last(next + slices.after(1), sources_.data(), static_cast<int>(blocks), mine.nbytes / item, size_);
            }
            if (chunk >= 2 && receives_result)
                for (std::size_t i = 0; i < block_; ++i)
                    tensor.copy_from(at(rank / block_, i, round) + slices.after(1), slices.of(chunk - 2, i).nbytes);
        });
    }
    return true;
}

// Fetches the shared tensor of `rank`; returns nullptr if the call has failed. The owner may have withdrawn the tensor
// after a failure, so this also checks whether a rank has failed the call, died or left.
std::shared_ptr<shm::Segment> Group::region_of(int rank, shm::RegionId id) {
    using Clock = std::chrono::steady_clock;
    const int member = members_[static_cast<std::size_t>(rank)];
    const auto started = Clock::now();
    WaitRegistry::Entry entry;
    search_.reset();
    for (int iteration = 1;; ++iteration) {
        shm::FetchResult found = mesh_.region(member, id, Clock::now() + kPollInterval);
        if (found.segment) return std::move(found.segment);
        if (found.error != 0) {
            const std::int64_t waited_ns = std::chrono::nanoseconds(Clock::now() - started).count();
            fail_call(ExitReason::starved, {.missing = RankSet::of(rank_), .waited_ns = waited_ns});
            return nullptr;
        }
        if (!check_events(iteration, started, [rank] { return RankSet::of(rank); }, entry)) return nullptr;
    }
}

// Every rank maps the tensors of all ranks, reduces its slice in place and writes the result to all of them.
bool Group::all_reduce_shared(Call& call, std::uint32_t first) {
    const std::size_t nbytes = call.outputs[0].nbytes();
    const std::size_t item = item_size(call.dtype);
    const auto ranks = static_cast<std::size_t>(size_);
    std::vector<std::shared_ptr<shm::Segment>> regions(ranks);
    std::vector<std::uint8_t*> tensors(ranks);
    for (int r = 0; r < size_; ++r) {
        const auto at = static_cast<std::size_t>(r);
        if (r == rank_) {
            tensors[at] = call.outputs[0].ranges()[0].data;
            continue;
        }
        const CallHeader& header = cell(r, first).header;
        regions[at] = region_of(r, header.region);
        if (!regions[at]) return false;
        if (header.offset > regions[at]->size() || nbytes > regions[at]->size() - header.offset)
            return fail_call(ExitReason::peer_lost, {.missing = RankSet::of(r), .gone = RankSet::of(r)});
        tensors[at] = regions[at]->data() + header.offset;
    }

    const ReduceFn kernel = find_reduction(call.dtype, call.reduce_op);
    const std::size_t each = in_lines((nbytes + ranks - 1) / ranks);
    const std::size_t from = each * static_cast<std::size_t>(rank_);
    const std::size_t to = from + each < nbytes ? from + each : nbytes;
    for (std::size_t at = from; at < to; at += kTile) {
        const std::size_t n = to - at < kTile ? to - at : kTile;
        for (std::size_t r = 0; r < ranks; ++r) sources_[r] = tensors[r] + at;
        std::uint8_t* mine = tensors[static_cast<std::size_t>(rank_)] + at;
        kernel(mine, sources_.data(), size_, n / item, size_);
        for (std::size_t r = 0; r < ranks; ++r)
            if (tensors[r] + at != mine) std::memcpy(tensors[r] + at, mine, n);
    }
    const std::uint32_t done = round_++;
    publish(done);
    return await(done);
}

// Each slot contains one part per peer. A rank reduces its parts in the peers' slots with its own contribution, which
// it reads in place.
bool Group::reduce_scatter(Call& call) {
    if (!begin(call, nullptr, 0)) return false;
    const std::size_t item = item_size(call.dtype);
    const auto rank = static_cast<std::size_t>(rank_);
    const std::size_t others = size_ == 1 ? 1 : static_cast<std::size_t>(size_) - 1;
    const std::size_t nbytes = call.inputs[rank].nbytes();
    const std::size_t chunk_bytes = staged(nbytes, slot_capacity_ / others);
    const auto offset = [chunk_bytes](std::size_t to, std::size_t from) {
        return (to < from ? to : to - 1) * chunk_bytes;
    };
    const Chunks chunks{nbytes, chunk_bytes};
    set_stage_bytes(others * chunk_bytes);
    const ReduceFn kernel = find_reduction(call.dtype, call.reduce_op);
    alignas(64) std::uint8_t tile[kUpdateTile];
    return pipeline(
        chunks.count(),
        [&](std::size_t chunk, std::uint8_t* slot) {
            for (std::size_t r = 0; r < call.inputs.size(); ++r)
                if (r != rank) slot_copier_.stage_next(call.inputs[r], slot + offset(r, rank), chunks.size(chunk));
        },
        [&](std::size_t chunk, std::uint32_t round) {
            call.inputs[rank].next(chunks.size(chunk), [&](const std::uint8_t* own, std::size_t n, std::size_t done) {
                const auto reduce = [&](std::uint8_t* data, std::size_t within, std::size_t at) {
                    for (std::size_t r = 0; r < sources_.size(); ++r)
                        sources_[r] =
                            r == rank ? own + at : slot(static_cast<int>(r), round) + offset(rank, r) + done + at;
                    kernel(data, sources_.data(), size_, within / item, size_);
                    if (call.update) call.update->apply(data, within);
                };
                if (call.outputs.empty()) {
                    for (std::size_t at = 0; at < n; at += kUpdateTile) reduce(tile, std::min(kUpdateTile, n - at), at);
                    return;
                }
                call.outputs[0].next(n, [&](std::uint8_t* data, std::size_t within, std::size_t from) {
                    const std::size_t step = call.update ? kUpdateTile : within;
                    for (std::size_t at = 0; at < within; at += step)
                        reduce(data + at, std::min(step, within - at), from + at);
                });
            });
        });
}

}  // namespace paceline::host
