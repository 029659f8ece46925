// Threads that do I/O, and complete reads and writes at an offset. Errors are errno values, not exceptions.
#pragma once
#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>

namespace kvtier {

// Settings of the library's own threads; call first on each.
void become_worker();

struct ReadResult {
  int error;     // 0, ENODATA when the file ends before the needed bytes, or an errno
  size_t bytes;  // read
};

// Reads `needed` bytes or more, up to `bytes`: a direct read asks for whole pages also where the file ends in one.
ReadResult read_at_least(int fd, uint8_t* target, size_t needed, size_t bytes, int64_t offset);

// Bytes of a range of a file in the page cache (cachestat, Linux 6.5), or -1 if that cannot be found out.
int64_t resident_bytes(int fd, uint64_t offset, uint64_t length);

// Calls preadv once and returns the number of bytes read, also 0 after an error.
int64_t read_once(int fd, const iovec* parts, size_t n_parts, int64_t offset);

// Calls fdatasync. Returns 0, also on a file system without it, or an errno.
int flush(int fd);

// Number of read calls of read_at_least and read_once in this process.
uint64_t reads_issued();

// Writes of one thread through its own kernel AIO context: one request at a time, waited for; pwrite where AIO fails.
//
// On FUSE-like file systems a synchronous direct write holds the file's lock until it is done, so writers of one file
// exclude each other; an asynchronous one holds it only until it is sent. (Double of 8 stripes of 100 MB/s: 90 MB/s
// with eight threads of pwrite, 730 with sixteen of these.)
class Writer {
 public:
  Writer();
  ~Writer();
  Writer(const Writer&) = delete;
  Writer& operator=(const Writer&) = delete;

  // Writes all bytes. Returns 0 or an errno.
  int write_fully(int fd, const uint8_t* source, size_t bytes, int64_t offset);

 private:
  ssize_t write_once(int fd, const uint8_t* source, size_t bytes, int64_t offset);  // bytes taken, or -errno

  unsigned long context_ = 0;  // 0: no AIO
};

}  // namespace kvtier
