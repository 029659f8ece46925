#include "transfer.h"

#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "batch.h"

namespace kvtier {
namespace {

std::atomic<uint64_t> n_reads{0};

}  // namespace

void become_worker() {
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, nullptr);  // the application's own threads handle signals
  pthread_setname_np(pthread_self(), "kvtier-io");
}

ReadResult read_at_least(int fd, uint8_t* target, size_t needed, size_t bytes, int64_t offset) {
  size_t done = 0, reached = 0;
  while (reached < needed) {
    n_reads.fetch_add(1, std::memory_order_relaxed);
    const ssize_t n = pread(fd, target + done, bytes - done, offset + static_cast<int64_t>(done));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return {errno, reached};
    if (done + static_cast<size_t>(n) <= reached) return {ENODATA, reached};  // no new byte: the end of the file
    reached = done + static_cast<size_t>(n);
    done = round_down(reached, kPageBytes);  // direct I/O moves a partial page again
  }
  return {0, reached};
}

int64_t resident_bytes(int fd, uint64_t offset, uint64_t length) {
  struct {
    uint64_t offset, length;
  } range{offset, length};
  struct {
    uint64_t cached, dirty, writeback, evicted, recently_evicted;
  } pages{};
  constexpr long kCachestat = 451;  // on all architectures; headers may be older
  if (syscall(kCachestat, fd, &range, &pages, 0) != 0) return -1;
  return static_cast<int64_t>(pages.cached) * sysconf(_SC_PAGESIZE);
}

int64_t read_once(int fd, const iovec* parts, size_t n_parts, int64_t offset) {
  n_reads.fetch_add(1, std::memory_order_relaxed);
  return std::max<ssize_t>(0, preadv(fd, parts, static_cast<int>(n_parts), offset));
}

int flush(int fd) {
  while (fdatasync(fd) != 0)
    if (errno != EINTR) return errno == EINVAL || errno == ENOSYS ? 0 : errno;
  return 0;
}

uint64_t reads_issued() { return n_reads.load(std::memory_order_relaxed); }

Writer::Writer() {
  if (syscall(SYS_io_setup, 1, &context_) != 0) context_ = 0;
}

Writer::~Writer() {
  if (context_ != 0) syscall(SYS_io_destroy, context_);
}

int Writer::write_fully(int fd, const uint8_t* source, size_t bytes, int64_t offset) {
  size_t done = 0, reached = 0;
  while (reached < bytes) {
    const ssize_t n = write_once(fd, source + done, bytes - done, offset + static_cast<int64_t>(done));
    if (n == -EINTR) continue;
    if (n < 0) return static_cast<int>(-n);
    if (done + static_cast<size_t>(n) <= reached) return EIO;  // nothing written, without an error
    reached = done + static_cast<size_t>(n);
    done = round_down(reached, kPageBytes);
  }
  return 0;
}

ssize_t Writer::write_once(int fd, const uint8_t* source, size_t bytes, int64_t offset) {
  if (context_ != 0) {
    iocb request{};
    request.aio_lio_opcode = IOCB_CMD_PWRITE;
    request.aio_fildes = static_cast<uint32_t>(fd);
    request.aio_buf = reinterpret_cast<uint64_t>(source);
    request.aio_nbytes = bytes;
    request.aio_offset = offset;
    iocb* requests[] = {&request};
    if (syscall(SYS_io_submit, context_, 1, requests) == 1) {
      // The source must stay until the kernel has completed the request, so nothing else ends this wait.
      io_event answer{};
      while (syscall(SYS_io_getevents, context_, 1, 1, &answer, nullptr) != 1) {
      }
      return static_cast<ssize_t>(answer.res);
    }
  }
  // No AIO, or not for this file: pwrite writes, or gives the error.
  const ssize_t n = pwrite(fd, source, bytes, offset);
  return n < 0 ? -errno : n;
}

}  // namespace kvtier
