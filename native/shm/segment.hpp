// Memory that several processes map: a memfd whose descriptor is passed between them and which is freed with its last
// holder.
//
// It is sealed against shrinking, so that no holder can make another's access fault.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace paceline::shm {

// Where the parts of a segment belong to different processes, a huge page would take all of them to the place of the
// first one that touches it.
enum class Pages : std::uint32_t { huge_if_large, small };

class Segment {
  public:
    // Returns nullptr, with errno set, when the memory cannot be allocated.
    static std::shared_ptr<Segment> create(std::size_t size, Pages pages = Pages::huge_if_large);
    // Takes over `fd`; returns nullptr if the memory behind it is smaller than `size` or not sealed.
    static std::shared_ptr<Segment> adopt(int fd, std::size_t size, Pages pages = Pages::huge_if_large);

    Segment(const Segment&) = delete;
    Segment& operator=(const Segment&) = delete;
    ~Segment();

    std::uint8_t* data() const { return data_; }
    std::size_t size() const { return size_; }
    Pages pages() const { return pages_; }
    int fd() const { return fd_; }
    // The memory stays mapped, but it can no longer be passed to another process.
    void close_descriptor();
    // Replaces the pages that hold these bytes, in this process, by copies that it alone has. They stay as they are if
    // the system has no memory for that.
    void make_private(std::size_t offset, std::size_t nbytes) const;

  private:
    static std::shared_ptr<Segment> map(int fd, std::size_t size, Pages pages);
    Segment(int fd, std::uint8_t* data, std::size_t size, Pages pages)
        : fd_(fd), data_(data), size_(size), pages_(pages) {}

    int fd_;
    std::uint8_t* data_;
    std::size_t size_;
    Pages pages_;
};

}  // namespace paceline::shm
