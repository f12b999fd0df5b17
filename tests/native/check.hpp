// An assertion for tests: if its condition is false, CHECK prints the condition and its location, and ends the program.
#pragma once

#include <cstdio>
#include <cstdlib>

#define CHECK(condition)                                                                       \
    do {                                                                                       \
        if (!(condition)) {                                                                    \
            std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #condition); \
            std::_Exit(1); /* other threads may use objects that exit() would destroy */       \
        }                                                                                      \
    } while (false)
