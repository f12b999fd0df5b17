// Sockets that a child made by fork() must not keep open: while it lived, nobody would notice that its parent died.
//
// An owner of such sockets has a guard, as its last member; a child closes what is guarded before fork() returns there.
#pragma once

#include <functional>

namespace paceline {

class ForkGuard {
  public:
    // `close` runs in a forked child: it may close descriptors, and nothing else.
    explicit ForkGuard(std::function<void()> close);
    ForkGuard(const ForkGuard&) = delete;
    ForkGuard& operator=(const ForkGuard&) = delete;
    ~ForkGuard();

    // Closes here, and ends the guard, with no fork in between. Idempotent.
    void close();

  private:
    static void close_in_child();

    std::function<void()> close_;
};

// Whether this process was forked from one that had guards: a group's member, whose links the child must not use.
bool forked_from_member();

}  // namespace paceline
