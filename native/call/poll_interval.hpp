// Intervals of the loop in which a blocked call waits. In each iteration (a *turn*), the thread sleeps for at most
// kTurn and then checks for events that end the wait early: verdicts from other ranks, deaths, the deadline and Python
// signals.
#pragma once

#include <chrono>

namespace paceline {

constexpr std::chrono::milliseconds kTurn{20};
constexpr std::chrono::microseconds kSpin{50};  // how long a waiting thread polls lanes before it sleeps
constexpr int kTurnsPerInterruptCheck = 5;      // each check takes Python's interpreter lock
constexpr int kTurnsPerSilenceCheck = 25;       // each check queries the kernel about a connection

}  // namespace paceline
