/* Preloaded into a process, it appends to the file $RECORD_WRITES what the process changes below $RECORD_WRITES_BELOW:
 * writes with their bytes (also those of kernel AIO), sizes, names and fsyncs, one after another in the order in which
 * they were made. Read by images.py:
 *
 *     u32 kind, u32 bytes of path, u32 bytes of the second path, u64 offset or size, u64 bytes of data, then these three
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { CREATE = 1, WRITE, SIZE, ALLOCATE, SYNC, LINK, RENAME, UNLINK, MKDIR, RMDIR };

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[1024];
static int record = -1;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

__attribute__((constructor)) static void start(void) {
  const char *folder = getenv("RECORD_WRITES_BELOW"), *file = getenv("RECORD_WRITES");
  if (folder == NULL || file == NULL) return;
  snprintf(root, sizeof root, "%s/", folder);
  record = REAL(open)(file, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
}

static int is_ours(const char *path) { return record >= 0 && strncmp(path, root, strlen(root)) == 0; }

/* 0 where the descriptor is none of ours. */
static int path_of(int fd, char *path, size_t room) {
  char link[64];
  if (record < 0) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  const ssize_t n = readlink(link, path, room - 1);
  if (n <= 0) return 0;
  path[n] = 0;
  return is_ours(path);
}

static void note_parts(uint32_t kind, const char *path, const char *other, uint64_t at, const struct iovec *parts, int n) {
  const char *tail = path + strlen(root), *second = other == NULL ? "" : other + strlen(root);
  uint64_t bytes = 0;
  for (int i = 0; i < n; i++) bytes += parts[i].iov_len;
  struct __attribute__((packed)) {
    uint32_t kind, path, other;
    uint64_t at, bytes;
  } head = {kind, (uint32_t)strlen(tail), (uint32_t)strlen(second), at, bytes};
  struct iovec all[3 + 64] = {{&head, sizeof head}, {(void *)tail, strlen(tail)}, {(void *)second, strlen(second)}};
  if (n > 64) abort();
  memcpy(all + 3, parts, (size_t)n * sizeof *parts);
  if (REAL(writev)(record, all, 3 + n) != (ssize_t)(sizeof head + strlen(tail) + strlen(second) + bytes)) abort();
}

static void note(uint32_t kind, const char *path, const char *other, uint64_t at) {
  note_parts(kind, path, other, at, NULL, 0);
}

/* `call` and what records it are one step for all threads. */
#define STEP(type, call, ...)            \
  pthread_mutex_lock(&lock);             \
  const type answer = call;              \
  const int error = errno;               \
  if (answer >= 0) { __VA_ARGS__; }      \
  pthread_mutex_unlock(&lock);           \
  errno = error;                         \
  return answer

/* What `path` means, beginning with the root if it lies there: relative ones lie in `folder`. */
static const char *full(int folder, const char *path, char *room, size_t n_room) {
  if (path[0] == '/' || record < 0) return path;
  char link[64], place[1024];
  snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
  const ssize_t n = readlink(folder == AT_FDCWD ? "/proc/self/cwd" : link, place, sizeof place - 1);
  snprintf(room, n_room, "%.*s/%s", n < 0 ? 0 : (int)n, place, path);
  return room;
}

typedef int (*OpenAt)(int, const char *, int, ...);

static int opened(OpenAt open_at, int folder, const char *path, int flags, int mode) {
  struct stat before;
  char room[2048];
  const char *name = full(folder, path, room, sizeof room);
  const int changes = is_ours(name) && (flags & (O_CREAT | O_TRUNC)) && (flags & O_TMPFILE) != O_TMPFILE;
  if (!changes) return open_at(folder, path, flags, mode);
  pthread_mutex_lock(&lock);
  const int was_there = stat(name, &before) == 0;
  const int fd = open_at(folder, path, flags, mode);
  const int error = errno;
  if (fd >= 0 && !was_there) note(CREATE, name, NULL, 0);
  if (fd >= 0 && was_there && (flags & O_TRUNC)) note(SIZE, name, NULL, 0);
  pthread_mutex_unlock(&lock);
  errno = error;
  return fd;
}

#define OPENS(name, declared, folder)                                \
  int name declared {                                                \
    va_list more;                                                    \
    va_start(more, flags);                                           \
    const int mode = va_arg(more, int);                              \
    va_end(more);                                                    \
    return opened(REAL(openat), folder, path, flags, mode);          \
  }
OPENS(open, (const char *path, int flags, ...), AT_FDCWD)
OPENS(open64, (const char *path, int flags, ...), AT_FDCWD)
OPENS(openat, (int folder, const char *path, int flags, ...), folder)
OPENS(openat64, (int folder, const char *path, int flags, ...), folder)

static ssize_t written(int fd, const struct iovec *parts, int n, off_t at, ssize_t answer) {
  char path[1024];
  if (answer > 0 && path_of(fd, path, sizeof path)) {
    if (n == 1) {
      const struct iovec part = {parts->iov_base, (size_t)answer};
      note_parts(WRITE, path, NULL, (uint64_t)at, &part, 1);
    } else {
      note_parts(WRITE, path, NULL, (uint64_t)at, parts, n);
    }
  }
  return answer;
}

static off_t place(int fd) { return lseek(fd, 0, SEEK_CUR); }

ssize_t write(int fd, const void *data, size_t bytes) {
  const struct iovec part = {(void *)data, bytes};
  char path[1024];
  if (!path_of(fd, path, sizeof path)) return REAL(write)(fd, data, bytes);
  STEP(ssize_t, REAL(write)(fd, data, bytes), written(fd, &part, 1, place(fd) - answer, answer));
}

ssize_t writev(int fd, const struct iovec *parts, int n) {
  char path[1024];
  if (!path_of(fd, path, sizeof path)) return REAL(writev)(fd, parts, n);
  STEP(ssize_t, REAL(writev)(fd, parts, n), written(fd, parts, n, place(fd) - answer, answer));
}

#define WRITES_AT(name)                                                                   \
  ssize_t name(int fd, const void *data, size_t bytes, off_t at) {                        \
    const struct iovec part = {(void *)data, bytes};                                      \
    STEP(ssize_t, REAL(name)(fd, data, bytes, at), written(fd, &part, 1, at, answer));    \
  }
WRITES_AT(pwrite)
WRITES_AT(pwrite64)

#define WRITES_PARTS_AT(name)                                                           \
  ssize_t name(int fd, const struct iovec *parts, int n, off_t at) {                    \
    STEP(ssize_t, REAL(name)(fd, parts, n, at), written(fd, parts, n, at, answer));     \
  }
WRITES_PARTS_AT(pwritev)
WRITES_PARTS_AT(pwritev64)

#define WRITES_PARTS_AS(name)                                                                     \
  ssize_t name(int fd, const struct iovec *parts, int n, off_t at, int flags) {                   \
    STEP(ssize_t, REAL(name)(fd, parts, n, at, flags), written(fd, parts, n, at, answer));        \
  }
WRITES_PARTS_AS(pwritev2)
WRITES_PARTS_AS(pwritev64v2)

/* Return 1: space is reserved. Holes and the like would change bytes, and cannot be recorded. */
static int grows(int mode) {
  if (mode != 0) abort();
  return 1;
}

#define WITH_FD(name, declared, arguments, ok, kind, at)                                   \
  int name declared {                                                                      \
    char path[1024];                                                                       \
    if (!path_of(fd, path, sizeof path)) return REAL(name) arguments;                      \
    STEP(int, REAL(name) arguments, if (ok) note(kind, path, NULL, (uint64_t)(at)));       \
  }
WITH_FD(ftruncate, (int fd, off_t size), (fd, size), 1, SIZE, size)
WITH_FD(ftruncate64, (int fd, off_t size), (fd, size), 1, SIZE, size)
WITH_FD(posix_fallocate, (int fd, off_t at, off_t bytes), (fd, at, bytes), answer == 0, ALLOCATE, at + bytes)
WITH_FD(posix_fallocate64, (int fd, off_t at, off_t bytes), (fd, at, bytes), answer == 0, ALLOCATE, at + bytes)
WITH_FD(fallocate, (int fd, int mode, off_t at, off_t bytes), (fd, mode, at, bytes), grows(mode), ALLOCATE, at + bytes)
WITH_FD(fallocate64, (int fd, int mode, off_t at, off_t bytes), (fd, mode, at, bytes), grows(mode), ALLOCATE, at + bytes)
WITH_FD(fsync, (int fd), (fd), 1, SYNC, 0)
WITH_FD(fdatasync, (int fd), (fd), 1, SYNC, 0)

#define WITH_PATHS(name, declared, arguments, from_folder, to_folder, kind)                                  \
  int name declared {                                                                                         \
    char one[2048], two[2048];                                                                                \
    const char *old = full(from_folder, from, one, sizeof one), *new = full(to_folder, to, two, sizeof two);  \
    STEP(int, REAL(name) arguments, if (is_ours(new)) note(kind, old, new, 0));                               \
  }
WITH_PATHS(link, (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD, LINK)
WITH_PATHS(linkat, (int a, const char *from, int b, const char *to, int flags), (a, from, b, to, flags), a, b, LINK)
WITH_PATHS(rename, (const char *from, const char *to), (from, to), AT_FDCWD, AT_FDCWD, RENAME)
WITH_PATHS(renameat, (int a, const char *from, int b, const char *to), (a, from, b, to), a, b, RENAME)

#define WITH_PATH(name, declared, arguments, folder, kind)                        \
  int name declared {                                                             \
    char room[2048];                                                              \
    const char *changed = full(folder, path, room, sizeof room);                  \
    STEP(int, REAL(name) arguments, if (is_ours(changed)) note(kind, changed, NULL, 0)); \
  }
WITH_PATH(unlink, (const char *path), (path), AT_FDCWD, UNLINK)
WITH_PATH(unlinkat, (int a, const char *path, int flags), (a, path, flags), a, flags &AT_REMOVEDIR ? RMDIR : UNLINK)
WITH_PATH(mkdir, (const char *path, mode_t mode), (path, mode), AT_FDCWD, MKDIR)
WITH_PATH(mkdirat, (int a, const char *path, mode_t mode), (a, path, mode), a, MKDIR)
WITH_PATH(rmdir, (const char *path), (path), AT_FDCWD, RMDIR)

/* Kernel AIO has no function of its own in the C library. What is submitted is written from then on. */
long syscall(long number, ...) {
  va_list more;
  long a[6];
  va_start(more, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(more, long);
  va_end(more);
  if (number != SYS_io_submit || record < 0) return REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  STEP(long, REAL(syscall)(number, a[0], a[1], a[2], a[3], a[4], a[5]), {
    struct iocb **asked = (struct iocb **)a[2];
    for (long i = 0; i < answer; i++) {
      const struct iovec part = {(void *)(uintptr_t)asked[i]->aio_buf, asked[i]->aio_nbytes};
      written((int)asked[i]->aio_fildes, &part, 1, asked[i]->aio_offset, (ssize_t)part.iov_len);
    }
  });
}
