// Guards sockets that a forked child must not keep open: otherwise its parent's death could not be detected while the
// child lives.
//
// An owner of such sockets has a guard as its last member; the guarded sockets are closed in the child before fork()
// returns there.
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

// Whether this process was forked from a process with guards, that is, a member of a group whose links the child must
// not use.
bool forked_from_member();
// The number of such forks among this process and its ancestors; objects created at a different number are inherited.
std::uint32_t forks_from_members();

}  // namespace paceline
