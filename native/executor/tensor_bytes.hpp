// A call's tensors as one sequence of bytes with random access.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

#include "call/byte_stream.hpp"

namespace paceline::executor {

class TensorBytes {
  public:
    TensorBytes() = default;

    void append(const ByteStream& stream) {
        for (const ByteRange& range : stream.ranges()) append(range);
    }
    void append(const ByteRange& range) {
        if (range.nbytes == 0) return;
        starts_.push_back(nbytes_);
        ranges_.push_back(range);
        nbytes_ += range.nbytes;
    }

    std::size_t nbytes() const { return nbytes_; }

    // Stores the bytes [from, from + count) as at most `room` ranges in `into`; returns the number of ranges.
    std::size_t slice(std::size_t from, std::size_t count, ByteRange* into, std::size_t room) const {
        std::size_t used = 0;
        for (std::size_t i = index_of(from); count != 0 && used < room; ++i) {
            const std::size_t within = from - starts_[i];
            const std::size_t n = std::min(ranges_[i].nbytes - within, count);
            into[used++] = {ranges_[i].data + within, n};
            from += n;
            count -= n;
        }
        return used;
    }

    // Returns the longest contiguous run of at most `count` bytes that starts at offset `from`.
    ByteRange run(std::size_t from, std::size_t count) const {
        const std::size_t i = index_of(from);
        const std::size_t within = from - starts_[i];
        return {ranges_[i].data + within, std::min(ranges_[i].nbytes - within, count)};
    }

  private:
    std::size_t index_of(std::size_t at) const {
        if (ranges_.size() <= 1) return 0;
        return static_cast<std::size_t>(std::upper_bound(starts_.begin(), starts_.end(), at) - starts_.begin()) - 1;
    }

    std::vector<ByteRange> ranges_;
    std::vector<std::size_t> starts_;
    std::size_t nbytes_ = 0;
};

}  // namespace paceline::executor
