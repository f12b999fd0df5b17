#include "process/cores.hpp"

#include <sched.h>

#include <thread>

namespace paceline {

int usable_cores() {
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof allowed, &allowed) == 0) return CPU_COUNT(&allowed);
    return static_cast<int>(std::thread::hardware_concurrency());
}

}  // namespace paceline
