// The call site: the line in the user's program that makes a call. It is recorded when the call is made, because the
// rank may be at a different line by the time an error in the call is detected.
#pragma once

#include <nanobind/nanobind.h>

namespace paceline::bindings {

// Finds this thread's innermost frame that runs code from one of the user's files, and records the frame's line with
// the thread's next call. Has no effect if the recorder is off. The caller holds the interpreter lock.
void note_call_site();

// Sets the function that maps a file to its recorded name, or to None if the file is not the user's. Until this is
// called, no call sites are recorded.
void set_user_file_namer(nanobind::object name_of);

}  // namespace paceline::bindings
