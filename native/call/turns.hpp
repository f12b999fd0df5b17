// Intervals of a call's waits. A waiting thread sleeps for at most one turn at a time and then checks for events that
// end the wait early: verdicts from other ranks, deaths, the deadline and Python signals.
#pragma once

#include <chrono>

namespace paceline {

constexpr std::chrono::milliseconds kTurn{20};
constexpr std::chrono::microseconds kSpin{50};  // how long a waiting thread polls lanes before it sleeps
constexpr int kTurnsPerInterruptCheck = 5;      // each check takes Python's interpreter lock
constexpr int kTurnsPerSilenceCheck = 25;       // each check queries the kernel about a connection

}  // namespace paceline
