#include "record/snapshot.hpp"

#include <sys/mman.h>
#include <sys/stat.h>

#include <cerrno>
#include <memory>
#include <system_error>

#include "record/entries.hpp"

namespace paceline::record {
namespace {

template <std::size_t N, std::size_t Capacity>
void copy_table(const Entry<N> (&from)[Capacity], std::uint8_t* to) {
    for (const Entry<N>& entry : from) {
        std::uint64_t words[N] = {};
        const std::uint64_t stamp = copy(entry, words).value_or(kWriting);
        std::memcpy(to, &stamp, sizeof stamp);
        std::memcpy(to + sizeof stamp, words, sizeof words);
        to += sizeof(Entry<N>);
    }
}

// Copies words from the header and the names, which do not change once they have been stored.
void copy_words(const Recording& from, std::size_t offset, std::size_t nbytes, std::uint8_t* to) {
    const auto* const words = reinterpret_cast<const Word*>(reinterpret_cast<const std::uint8_t*>(&from) + offset);
    for (std::size_t i = 0; i < nbytes / sizeof(Word); ++i) {
        const std::uint64_t word = words[i].load(std::memory_order_acquire);
        std::memcpy(to + i * sizeof word, &word, sizeof word);
    }
}

}  // namespace

std::vector<std::uint8_t> snapshot(int fd) {
    struct stat status{};
    if (fstat(fd, &status) != 0) throw std::system_error(errno, std::generic_category(), "fstat of a recording");
    if (status.st_size < static_cast<off_t>(kBytes)) return {};
    void* const memory = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, fd, 0);
    if (memory == MAP_FAILED) throw std::system_error(errno, std::generic_category(), "mmap of a recording");
    const auto unmap = [](const Recording* mapped) { munmap(const_cast<Recording*>(mapped), kBytes); };
    const std::unique_ptr<const Recording, decltype(unmap)> from(static_cast<const Recording*>(memory), unmap);
    if (from->header.magic.load(std::memory_order_acquire) != kMagic) return {};
    std::vector<std::uint8_t> copied(kBytes);
    copy_words(*from, 0, sizeof(Header), copied.data());
    copy_words(*from, offsetof(Recording, names), sizeof(Recording::names), copied.data() + offsetof(Recording, names));
    copy_table(from->pairs, copied.data() + offsetof(Recording, pairs));
    copy_table(from->groups, copied.data() + offsetof(Recording, groups));
    copy_table(from->calls, copied.data() + offsetof(Recording, calls));
    copy_table(from->events, copied.data() + offsetof(Recording, events));
    copy_table(from->links, copied.data() + offsetof(Recording, links));
    return copied;
}

}  // namespace paceline::record
