// Polling intervals of a blocked call. In each iteration, the thread sleeps for at most kPollInterval and then checks
// for events that end the wait early: failure reports from other ranks, deaths, the deadline and Python signals.
#pragma once

#include <chrono>

namespace paceline {

constexpr std::chrono::milliseconds kPollInterval{20};
constexpr std::chrono::microseconds kMaxSpin{50};  // how long a waiting thread polls lanes before it sleeps
constexpr int kPollsPerInterruptCheck = 5;         // each check acquires Python's interpreter lock
constexpr int kPollsPerSilenceCheck = 25;          // each check queries the kernel about a connection

}  // namespace paceline
