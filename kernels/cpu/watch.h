// Seconds on a clock that only goes forward.
#pragma once
#include <time.h>

namespace baton {

static inline double seconds_now() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

}  // namespace baton
