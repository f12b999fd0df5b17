#include "shm/segment.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace paceline::shm {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

}  // namespace

std::shared_ptr<Segment> Segment::map(int fd, std::size_t size, PagePolicy pages) {
    void* address = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (address == MAP_FAILED) return nullptr;
    if (size >= kHugePage && pages == PagePolicy::huge_if_large) madvise(address, size, MADV_HUGEPAGE);
    return std::shared_ptr<Segment>(new Segment(fd, static_cast<std::uint8_t*>(address), size, pages));
}

std::shared_ptr<Segment> Segment::create(std::size_t size, PagePolicy pages) {
    const int fd = memfd_create("paceline", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd < 0) return nullptr;
    if (ftruncate(fd, static_cast<off_t>(size)) == 0 && fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) == 0) {
        if (auto segment = map(fd, size, pages)) return segment;
    }
    const int why = errno;
    close(fd);
    errno = why;
    return nullptr;
}

std::shared_ptr<Segment> Segment::adopt(int fd, std::size_t size, PagePolicy pages) {
    struct stat status{};
    const int seals = fcntl(fd, F_GET_SEALS);
    const bool sound = fstat(fd, &status) == 0 && status.st_size >= 0 &&
                       static_cast<std::size_t>(status.st_size) >= size && size > 0 && seals >= 0 &&
                       (seals & F_SEAL_SHRINK) != 0;
    if (sound) {
        if (auto segment = map(fd, size, pages)) return segment;
    }
    close(fd);
    return nullptr;
}

Segment::~Segment() {
    munmap(data_, size_);
    close_descriptor();
}

void Segment::close_descriptor() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
}

void Segment::make_private(std::size_t offset, std::size_t nbytes) const {
    const auto page = static_cast<std::size_t>(sysconf(_SC_PAGESIZE));
    const std::size_t from = offset / page * page;
    const std::size_t length = (offset + nbytes - from + page - 1) / page * page;
    void* const copy = mmap(nullptr, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (copy == MAP_FAILED) return;
    if (length >= kHugePage) madvise(copy, length, MADV_HUGEPAGE);
    std::memcpy(copy, data_ + from, length < size_ - from ? length : size_ - from);
    if (mremap(copy, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, data_ + from) == MAP_FAILED) munmap(copy, length);
}

}  // namespace paceline::shm
