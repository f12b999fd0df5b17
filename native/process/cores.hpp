// How many ranks can run at the same time: it decides whether a rank that waits may keep its core busy.
#pragma once

namespace paceline {

// The number of cores this process may run on.
int usable_cores();

}  // namespace paceline
