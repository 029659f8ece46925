#include "transfer.h"

#include <unistd.h>

#include <cerrno>

#include "batch.h"

namespace kvtier {
namespace {

// Direct I/O goes on at whole pages only, so what a short transfer left of a page is moved again.
size_t whole_pages(size_t bytes) { return bytes / kPageBytes * kPageBytes; }

}  // namespace

int read_fully(int fd, uint8_t* target, size_t bytes, int64_t offset) {
  size_t done = 0, reached = 0;
  while (reached < bytes) {
    const ssize_t n = pread(fd, target + done, bytes - done, offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (done + static_cast<size_t>(n) <= reached) return ENODATA;  // no byte more than last time: the end of the file
    reached = done + static_cast<size_t>(n);
    done = whole_pages(reached);
  }
  return 0;
}

int write_fully(int fd, const uint8_t* source, size_t bytes, int64_t offset) {
  size_t done = 0, reached = 0;
  while (reached < bytes) {
    const ssize_t n = pwrite(fd, source + done, bytes - done, offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return errno;
    if (done + static_cast<size_t>(n) <= reached) return EIO;  // a device that takes nothing and gives no reason
    reached = done + static_cast<size_t>(n);
    done = whole_pages(reached);
  }
  return 0;
}

}  // namespace kvtier
