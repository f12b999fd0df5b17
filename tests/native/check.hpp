// The minimum that a test needs: CHECK ends the program and prints the location and the condition that failed.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
            std::_Exit(1); /* other threads still run, and use what exit() would destroy */    \
        }                                                                                      \
    } while (false)
