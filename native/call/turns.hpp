// Every wait of a call goes in turns: a thread sleeps for at most one turn, unless it is woken, and then looks around
// for whatever ends the wait early (verdicts of other ranks, deaths, the deadline, Python's signals).
#pragma once

#include <chrono>

namespace paceline {

constexpr std::chrono::milliseconds kTurn{20};
constexpr std::chrono::microseconds kSpin{50};  // a wait for lanes looks at them for so long before it sleeps
constexpr int kTurnsPerInterruptCheck = 5;      // each check takes Python's interpreter lock
constexpr int kTurnsPerSilenceCheck = 25;       // each check asks the kernel about a connection

}  // namespace paceline
