// Complete reads and writes at an offset. Errors are errno values, not exceptions.
#pragma once
#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace kvtier {

// 0 when all bytes landed, ENODATA when the file ends before them, else errno.
int read_fully(int fd, uint8_t* target, size_t bytes, int64_t offset);

// One call, into several places: how many bytes came, from `offset` on; 0 also when there was an error.
int64_t read_once(int fd, const iovec* parts, size_t n_parts, int64_t offset);

// fdatasync: 0, also on a file system without it, or errno.
int flush(int fd);

// Calls that read_fully and read_once have made so far in this process.
uint64_t reads_issued();

// Reads a byte of each page just written to a file system in memory. The kernel moves a page to its active list at the
// first read after the write, under one lock for all: whoever reads a prompt's KV first would wait for that, and does so
// here instead, in the background. (tmpfs, 16 threads: first reads at 26 GB/s, later ones at 75.) Errors don't matter.
void touch_pages(int fd, int64_t offset, size_t bytes);

// Writes of one thread, through a kernel AIO context of its own: one request, waited for.
//
// A synchronous direct write holds the file's lock on FUSE-like file systems until it is done, so threads that write
// to one file wait for each other; an asynchronous one lets the lock go when it has been sent. (Double of 8 stripes of
// 100 MB/s: 90 MB/s with eight threads of pwrite, 730 with sixteen of these.) Where AIO is refused it is plain pwrite.
class Writer {
 public:
  Writer();
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // 0 when all bytes were taken, else errno.
  int write_fully(int fd, const uint8_t* source, size_t bytes, int64_t offset);

 private:
  ssize_t write_once(int fd, const uint8_t* source, size_t bytes, int64_t offset);  // bytes taken, or -errno

  unsigned long context_ = 0;  // 0: no AIO here
};

}  // namespace kvtier
