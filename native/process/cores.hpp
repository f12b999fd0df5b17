// The number of usable cores, which decides whether a waiting rank may keep its core busy.
#pragma once

namespace paceline {

// The number of cores this process may run on.
int usable_cores();

}  // namespace paceline
