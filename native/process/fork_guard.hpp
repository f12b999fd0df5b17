// Closes sockets in forked children. A child that kept them open would prevent other ranks from detecting its parent's
// death.
//
// The owner of such sockets declares a guard as its last member. In the child, the sockets are closed before fork()
// returns.
#pragma once

#include <cstdint>
#include <functional>

namespace paceline {

class ForkGuard {
  public:
    // `close` runs in a forked child and must only close descriptors.
    explicit ForkGuard(std::function<void()> close);
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;
    ~ForkGuard();

    // Calls `close` in this process and removes the guard; no fork can occur in between. Idempotent.
    void close();

  private:
    static void close_in_child();

    std::function<void()> close_;
};

// Returns true if this process was forked from a process with guards, that is, from a member of a group. A child must
// not use its parent's links.
bool is_forked_from_member();
// Returns the number of forks in this process's ancestry in which the parent was a member of a group. An object that
// stored a different number was inherited from a parent.
std::uint32_t member_fork_count();

}  // namespace paceline
