// A byte stream over a tensor or a list of tensors, read or written from front to back.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <utility>
#include <vector>

namespace paceline {

struct ByteRange {
    std::uint8_t* data;
    std::size_t nbytes;
};

class ByteStream {
  public:
    ByteStream() = default;
    explicit ByteStream(std::vector<ByteRange> ranges) : ranges_(std::move(ranges)) {
        for (const ByteRange& range : ranges_) nbytes_ += range.nbytes;
    }

    std::size_t nbytes() const { return nbytes_; }
    const std::vector<ByteRange>& ranges() const { return ranges_; }
    // Returns to the front, so that another call can use the same ranges.
    void rewind() { index_ = within_ = 0; }

    // Calls visit(data, n, done) for each range of the next `count` bytes. `done` is the number of bytes that have
    // already been visited.
    template <class Visit>
    void next(std::size_t count, Visit visit) {
        std::size_t done = 0;
        while (done < count) {
            const ByteRange& range = ranges_[index_];
            const std::size_t rest = range.nbytes - within_;
            const std::size_t n = rest < count - done ? rest : count - done;
            if (n != 0) visit(range.data + within_, n, done);
            done += n;
            within_ += n;
            if (within_ == range.nbytes) {
                ++index_;
                within_ = 0;
            }
        }
    }

    void copy_to(std::uint8_t* to, std::size_t count) {
        next(count,
             [to](const std::uint8_t* data, std::size_t n, std::size_t done) { std::memcpy(to + done, data, n); });
    }
    // Copies the next `count` bytes without advancing.
    void peek_to(std::uint8_t* to, std::size_t count) const {
        if (count == 0) return;
        if (ranges_.size() == 1) {
            std::memcpy(to, ranges_[0].data + within_, count);
        } else {
            ByteStream(*this).copy_to(to, count);
        }
    }
    void copy_from(const std::uint8_t* from, std::size_t count) {
        next(count, [from](std::uint8_t* data, std::size_t n, std::size_t done) { std::memcpy(data, from + done, n); });
    }
    void copy_from(ByteStream& from, std::size_t count) {
        next(count, [&from](std::uint8_t* data, std::size_t n, std::size_t) { from.copy_to(data, n); });
    }

  private:
    std::vector<ByteRange> ranges_;
    std::size_t nbytes_ = 0;
    std::size_t index_ = 0;
    std::size_t within_ = 0;
};

}  // namespace paceline
