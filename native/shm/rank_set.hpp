// A set of ranks on one host. Its size is fixed, so that it can be stored in shared memory.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace paceline::shm {

constexpr int kMaxRanks = 1024;  // per host; the same as MAX_RANKS_OF_HOST in comm/engine/native/bootstrap.py

class RankSet {
  public:
    RankSet() = default;
    static RankSet of(int rank) {
        RankSet one;
        one.add(rank);
        return one;
    }

    void add(int rank) { word(rank) |= bit(rank); }
    bool has(int rank) const { return (words_[static_cast<std::size_t>(rank) / kBits] & bit(rank)) != 0; }
    bool empty() const { return first() < 0; }
    // Returns the lowest rank, or -1 if the set is empty.
    int first() const {
        for (std::size_t i = 0; i < words_.size(); ++i)
            if (words_[i] != 0) return static_cast<int>(i * kBits) + std::countr_zero(words_[i]);
        return -1;
    }
    std::vector<int> ranks() const {
        std::vector<int> all;
        for (std::size_t i = 0; i < words_.size(); ++i)
            for (std::uint64_t rest = words_[i]; rest != 0; rest &= rest - 1)
                all.push_back(static_cast<int>(i * kBits) + std::countr_zero(rest));
        return all;
    }

    RankSet operator|(const RankSet& other) const {
        RankSet both = *this;
        for (std::size_t i = 0; i < words_.size(); ++i) both.words_[i] |= other.words_[i];
        return both;
    }
    RankSet operator&(const RankSet& other) const {
        RankSet both = *this;
        for (std::size_t i = 0; i < words_.size(); ++i) both.words_[i] &= other.words_[i];
        return both;
    }

  private:
    static constexpr std::size_t kBits = 64;

    static std::uint64_t bit(int rank) { return std::uint64_t{1} << (static_cast<std::size_t>(rank) % kBits); }
    std::uint64_t& word(int rank) { return words_[static_cast<std::size_t>(rank) / kBits]; }

    std::array<std::uint64_t, kMaxRanks / kBits> words_{};
};

}  // namespace paceline::shm
