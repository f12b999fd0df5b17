// One registration function a component; module.cpp calls them all.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline::bindings {}
