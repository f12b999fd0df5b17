// Memory mapped by several processes: a memfd whose descriptor is passed between processes. The kernel frees the memory
// when the last process releases it.
//
// The memfd is sealed against shrinking, so that no process can cause faults in another process by truncating it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace paceline::shm {

// Use `small` if parts of the segment belong to different processes: a huge page would place several parts on the NUMA
// node of whichever process touches the page first.
enum class PagePolicy : std::uint32_t { huge_if_large, small };

class Segment {
  public:
    // Returns nullptr, with errno set, if the memory cannot be allocated.
    static std::shared_ptr<Segment> create(std::size_t size, PagePolicy pages = PagePolicy::huge_if_large);
    // Takes ownership of `fd`; returns nullptr if its memory is smaller than `size` or not sealed.
    static std::shared_ptr<Segment> adopt(int fd, std::size_t size, PagePolicy pages = PagePolicy::huge_if_large);

    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment();

    std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }
    PagePolicy pages() const { return pages_; }
    int fd() const { return fd_; }
    // Closes the descriptor. The memory stays mapped but can no longer be passed to another process.
    void close_descriptor();
    // Replaces the pages that contain these bytes with private copies in this process. Leaves the pages unchanged if
    // memory runs out.
    void make_private(std::size_t offset, std::size_t nbytes) const;

  private:
    static std::shared_ptr<Segment> map(int fd, std::size_t size, PagePolicy pages);
    Segment(int fd, std::uint8_t* data, std::size_t size, PagePolicy pages)
        : fd_(fd), data_(data), size_(size), pages_(pages) {}

    int fd_;
    std::uint8_t* data_;
    std::size_t size_;
    PagePolicy pages_;
};

}  // namespace paceline::shm
