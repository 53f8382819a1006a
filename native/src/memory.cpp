// Scratch memory, and large pages.
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "native.h"
#include "scratch.h"

enum : size_t { LARGE_PAGE = 2u << 20 };

namespace {
struct Owned {
  uint8_t *start = nullptr;
  size_t bytes = 0;
  ~Owned() { free(start); }
};
}  // namespace

uint8_t *scratch(size_t bytes) {
  static thread_local Owned owned;
  if (bytes > owned.bytes) {
    free(owned.start);
    owned.bytes = (bytes + bytes / 4 + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE;
    void *start = nullptr;
    if (posix_memalign(&start, LARGE_PAGE, owned.bytes)) abort();
    owned.start = (uint8_t *)start;
    madvise(start, owned.bytes, MADV_HUGEPAGE);
  }
  return owned.start;
}

static double thread_seconds() {
  timespec now;
  clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
  return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

// The large pages that begin in a part of memory.
static uintptr_t first_page(const void *start) { return ((uintptr_t)start + LARGE_PAGE - 1) / LARGE_PAGE * LARGE_PAGE; }

// Ask for large pages under memory that nobody has written to yet: fewer misses when weights are read through.
NATIVE_API void native_use_large_pages(void *start, int64_t bytes) {
  uintptr_t first = first_page(start), last = ((uintptr_t)start + bytes) / LARGE_PAGE * LARGE_PAGE;
  if (last > first) madvise((void *)first, last - first, MADV_HUGEPAGE);
}

// Bring in the part of it that is written to next, start to stop; end: of all of it. Where a large page takes long, there are no
// more of them from here on: a virtual machine that gives free memory back to its host waits several milliseconds for each.
NATIVE_API void native_touch(void *start, void *stop, void *end) {
  const double longest = 1e-3;  // making a page zero takes a quarter of that
  for (uintptr_t page = first_page(start); page < (uintptr_t)stop; page += LARGE_PAGE) {
    double began = thread_seconds();
    *(volatile char *)page = 0;
    uintptr_t rest = page + LARGE_PAGE, last = (uintptr_t)end / LARGE_PAGE * LARGE_PAGE;
    if (thread_seconds() - began > longest && rest < last) madvise((void *)rest, last - rest, MADV_NOHUGEPAGE);
  }
}
