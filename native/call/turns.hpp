// Every wait of a call is divided into turns: a thread sleeps for at most one turn, unless it is woken, and then checks
// for events that end the wait early (verdicts of other ranks, deaths, the deadline, Python's signals).
#pragma once

#include <chrono>

namespace paceline {

constexpr std::chrono::milliseconds kTurn{20};
constexpr std::chrono::microseconds kSpin{50};  // the time for which a wait polls lanes before it sleeps
constexpr int kTurnsPerInterruptCheck = 5;      // each check takes Python's interpreter lock
constexpr int kTurnsPerSilenceCheck = 25;       // each check queries the kernel about a connection

}  // namespace paceline
