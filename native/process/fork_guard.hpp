// Guards sockets that a forked child must not keep open: while the child lived, nobody would notice its parent's death.
//
// An owner of such sockets has a guard as its last member; the guarded sockets are closed in the child before fork()
// returns there.
#pragma once

#include <cstdint>
#include <functional>

namespace paceline {

class ForkGuard {
  public:
    // `close` runs in a forked child and may only close descriptors.
    explicit ForkGuard(std::function<void()> close);
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;
    ~ForkGuard();

    // Calls `close` in this process and removes the guard, with no fork in between. Idempotent.
    void close();

  private:
    static void close_in_child();

    std::function<void()> close_;
};

// Whether this process was forked from one that had guards, a member of a group whose links the child must not use.
bool forked_from_member();
// How often that has happened to this process and its ancestors; what was made at another number is inherited.
std::uint32_t forks_from_members();

}  // namespace paceline
