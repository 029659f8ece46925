// faulty_fs with targets, as a striped file system has them: files whose names hold TARGET are on one that is away.
//
//     TARGET_FILE=FILE target_fs FOLDER FLAGS MOUNTPOINT [FUSE options]
//
// FILE is a file of at least 256 bytes that the test changes. TARGET is the text from byte 64 on; "" is no file. Each of
// the first bytes that is not 0 is a fault of these files until it is 0:
//
//     0  open, fstat, read, write and reserving space hang (names are the metadata server's: creating and looking up would
//        also hold the folder's lock in the kernel, and so hang for all its files)
//     1  reads, writes and opening fail (EIO), and fstat (ESHUTDOWN), as on Lustre with an OST away
//     2  reads end after half of what is asked for
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <fuse3/fuse.h>
static int run(int argc, char **argv, const struct fuse_operations *all);
#undef fuse_main
#define fuse_main(argc, argv, all, data) run(argc, argv, all)
#include "faulty_fs.c"
#include <stdlib.h>
#include <string.h>

enum { HANGS, FAILS, SHORT_READS, TARGET = 64, FILE_BYTES = 256 };
static volatile const unsigned char *target;
static struct fuse_operations passed;

static int is_on_target(const char *path, struct fuse_file_info *info) {
    const char *name = (const char *)target + TARGET;
    char real[PATH_MAX] = "", link[64];
    if (!*name) return 0;
    if (info && info->fh) {
        snprintf(link, sizeof link, "/proc/self/fd/%d", (int)info->fh);
        ssize_t n = readlink(link, real, sizeof real - 1);
        real[n < 0 ? 0 : n] = 0;
        path = real;
    }
    return path && strstr(path, name);
}

static int is_away(const char *path, struct fuse_file_info *info) {
    if (!is_on_target(path, info)) return 0;
    while (target[HANGS] && is_on_target(path, info)) usleep(5000);
    return target[FAILS];
}

static int target_getattr(const char *path, struct stat *found, struct fuse_file_info *info) {
    int error = passed.getattr(path, found, info);
    if (error || !info || !found->st_size) return error;  // libfuse asks so of a file that is just created, too
    return is_away(path, info) ? -ESHUTDOWN : 0;
}

static int target_open(const char *path, struct fuse_file_info *info) {
    info->fh = 0;
    return is_away(path, NULL) ? -EIO : passed.open(path, info);
}

static int target_read(const char *path, char *to, size_t n, off_t at, struct fuse_file_info *info) {
    if (is_away(path, info)) return -EIO;
    if (target[SHORT_READS] && is_on_target(path, info)) n /= 2;
    return passed.read(path, to, n, at, info);
}

static int target_write(const char *path, const char *from, size_t n, off_t at, struct fuse_file_info *info) {
    return is_away(path, info) ? -EIO : passed.write(path, from, n, at, info);
}

static int target_fallocate(const char *path, int how, off_t at, off_t n, struct fuse_file_info *info) {
    return is_away(path, info) ? -EIO : passed.fallocate(path, how, at, n, info);
}

static int run(int argc, char **argv, const struct fuse_operations *all) {
    int fd = open(getenv("TARGET_FILE"), O_RDONLY);
    target = mmap(NULL, FILE_BYTES, PROT_READ, MAP_SHARED, fd, 0);
    if (fd < 0 || target == MAP_FAILED) return 2;
    passed = *all;
    struct fuse_operations mine = *all;
    mine.getattr = target_getattr;
    mine.open = target_open;
    mine.read = target_read;
    mine.write = target_write;
    mine.fallocate = target_fallocate;
    return fuse_main_real(argc, argv, &mine, sizeof mine, NULL);
}
