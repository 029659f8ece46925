// A FUSE file system that passes everything on to a folder, and misbehaves while it is told to: a test double.
//
//     faulty_fs FOLDER FLAGS MOUNTPOINT [FUSE options]
//
// FLAGS is a file of at least 4 bytes that the test changes; each that is not 0 is a fault that lasts until it is 0:
//
//     0  reads hang         1  every operation hangs
//     2  read-only (EROFS)  3  reads fail (EIO)
//     4  (read once, at the mount) a file that is unlinked while it is open becomes .fuse_hiddenXXXX until its last close,
//        and keeps its link count of 1, as an NFS client makes it .nfsXXXX
//     5  a quota of so many MiB (EDQUOT), which statfs does not show; FOLDER-late counts
//     6  with 5: the limit answers ENOSPC, as a project quota or one full OST
//     7  so many files at most (ENOSPC); statfs shows it
//     8  the space of an unlinked file is free only after so many tenths of a second: it is in FOLDER-late until then
//     9  close fails with this errno
//
// Nothing is cached, neither bytes nor names, so what is done to the files of FOLDER is seen through the mount at once.
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
#include <ftw.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

enum {
    HANG_READS, HANG_ALL, READ_ONLY, FAIL_READS, SILLY_RENAME, QUOTA_MIB, QUOTA_ENOSPC, FILES_MAX, FREE_LATE, FAIL_CLOSE,
    N_FLAGS
};
static volatile const unsigned char *flags;
static const char *below;
static char late[PATH_MAX - 64];

// --- late freeing ---

static void *free_later(void *name) {
    usleep(100000 * flags[FREE_LATE]);
    unlink(name);
    free(name);
    return NULL;
}

static int unlink_late(const char *real) {
    static unsigned number;
    char name[PATH_MAX];
    snprintf(name, sizeof name, "%s/%u-%d", late, __sync_add_and_fetch(&number, 1), getpid());
    mkdir(late, 0700);
    if (rename(real, name) < 0) return -errno;
    pthread_t thread;
    pthread_create(&thread, NULL, free_later, strdup(name));
    pthread_detach(thread);
    return 0;
}

// --- limits ---

static __thread long walked_blocks, walked_files;

static int add_up(const char *path, const struct stat *found, int kind, struct FTW *info) {
    walked_blocks += found->st_blocks;
    walked_files += 1;
    return 0;
}

static void walk(void) {
    walked_blocks = walked_files = 0;
    nftw(below, add_up, 16, FTW_PHYS);
    nftw(late, add_up, 16, FTW_PHYS);
}

static int beyond_quota(int fd, off_t at, size_t n) {  // 0, or what a write or an allocation is answered
    struct stat found;
    if (!flags[QUOTA_MIB] || fstat(fd, &found) < 0) return 0;
    if (at + (off_t)n <= found.st_size && found.st_blocks * 512 >= found.st_size) return 0;  // allocated already
    walk();
    if (walked_blocks * 512 + (long)n <= (long)flags[QUOTA_MIB] << 20) return 0;
    return flags[QUOTA_ENOSPC] ? -ENOSPC : -EDQUOT;
}

static int beyond_files(void) {
    if (!flags[FILES_MAX]) return 0;
    walk();
    return walked_files < flags[FILES_MAX] ? 0 : -ENOSPC;
}

static void wait_while(int flag) {
    while (flags[flag]) usleep(5000);
}

#define ENTER() wait_while(HANG_ALL)
#define ENTER_TO_WRITE()                     \
    do {                                     \
        ENTER();                             \
        if (flags[READ_ONLY]) return -EROFS; \
    } while (0)
#define REAL(name, path) \
    char name[PATH_MAX]; \
    snprintf(name, sizeof name, "%s%s", below, path)
#define RESULT(call) ((call) < 0 ? -errno : 0)

static int fs_getattr(const char *path, struct stat *found, struct fuse_file_info *info) {
    ENTER();
    REAL(real, path ? path : "");
    if ((info ? fstat(info->fh, found) : lstat(real, found)) < 0) return -errno;
    if (path && strstr(path, "/.fuse_hidden")) found->st_nlink++;  // libfuse takes one off, and NFS does not
    return 0;
}

static int open_real(const char *path, struct fuse_file_info *info, int flags_more, mode_t mode) {
    REAL(real, path);
    int fd = open(real, (info->flags & ~O_DIRECT) | flags_more, mode);
    if (fd < 0) return -errno;
    info->fh = fd;
    info->direct_io = 1;
    return 0;
}

static int fs_open(const char *path, struct fuse_file_info *info) {
    ENTER();
    if (flags[READ_ONLY] && (info->flags & O_ACCMODE) != O_RDONLY) return -EROFS;
    return open_real(path, info, 0, 0);
}

static int fs_create(const char *path, mode_t mode, struct fuse_file_info *info) {
    ENTER_TO_WRITE();
    int refused = beyond_files();
    return refused ? refused : open_real(path, info, O_CREAT, mode);
}

static int fs_read(const char *path, char *to, size_t n, off_t at, struct fuse_file_info *info) {
    ENTER();
    wait_while(HANG_READS);
    if (flags[FAIL_READS]) return -EIO;
    ssize_t done = pread(info->fh, to, n, at);
    return done < 0 ? -errno : (int)done;
}

static int fs_write(const char *path, const char *from, size_t n, off_t at, struct fuse_file_info *info) {
    ENTER_TO_WRITE();
    int refused = beyond_quota(info->fh, at, n);
    if (refused) return refused;
    ssize_t done = pwrite(info->fh, from, n, at);
    return done < 0 ? -errno : (int)done;
}

static int fs_flush(const char *path, struct fuse_file_info *info) {
    return -flags[FAIL_CLOSE];
}

static int fs_release(const char *path, struct fuse_file_info *info) {
    close(info->fh);
    return 0;
}

static int fs_fsync(const char *path, int only_data, struct fuse_file_info *info) {
    ENTER();
    return RESULT(only_data ? fdatasync(info->fh) : fsync(info->fh));
}

static int fs_unlink(const char *path) {
    ENTER_TO_WRITE();
    REAL(real, path);
    return flags[FREE_LATE] ? unlink_late(real) : RESULT(unlink(real));
}

static int fs_mkdir(const char *path, mode_t mode) {
    ENTER_TO_WRITE();
    REAL(real, path);
    return RESULT(mkdir(real, mode));
}

static int fs_rmdir(const char *path) {
    ENTER_TO_WRITE();
    REAL(real, path);
    return RESULT(rmdir(real));
}

static int fs_rename(const char *from, const char *to, unsigned how) {
    ENTER_TO_WRITE();
    REAL(old, from);
    REAL(new, to);
    return RESULT(renameat2(AT_FDCWD, old, AT_FDCWD, new, how));
}

static int fs_link(const char *from, const char *to) {
    ENTER_TO_WRITE();
    REAL(old, from);
    REAL(new, to);
    return RESULT(link(old, new));
}

static int fs_truncate(const char *path, off_t size, struct fuse_file_info *info) {
    ENTER_TO_WRITE();
    if (info) return RESULT(ftruncate(info->fh, size));
    REAL(real, path);
    return RESULT(truncate(real, size));
}

static int fs_fallocate(const char *path, int how, off_t at, off_t n, struct fuse_file_info *info) {
    ENTER_TO_WRITE();
    int refused = beyond_quota(info->fh, at, n);
    return refused ? refused : RESULT(fallocate(info->fh, how, at, n));
}

static off_t fs_lseek(const char *path, off_t at, int whence, struct fuse_file_info *info) {
    ENTER();
    off_t found = lseek(info->fh, at, whence);
    return found < 0 ? -errno : found;
}

static int fs_chmod(const char *path, mode_t mode, struct fuse_file_info *info) {
    ENTER_TO_WRITE();
    if (info) return RESULT(fchmod(info->fh, mode));
    REAL(real, path);
    return RESULT(chmod(real, mode));
}

static int fs_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *info) {
    ENTER_TO_WRITE();
    if (info) return RESULT(futimens(info->fh, times));
    REAL(real, path);
    return RESULT(utimensat(AT_FDCWD, real, times, AT_SYMLINK_NOFOLLOW));
}

static int fs_statfs(const char *path, struct statvfs *found) {
    ENTER();
    if (statvfs(below, found) < 0) return -errno;
    if (flags[FILES_MAX]) {
        walk();
        found->f_files = flags[FILES_MAX];
        found->f_ffree = found->f_favail = walked_files < flags[FILES_MAX] ? flags[FILES_MAX] - walked_files : 0;
    }
    return 0;
}

static int fs_opendir(const char *path, struct fuse_file_info *info) {
    ENTER();
    REAL(real, path);
    DIR *folder = opendir(real);
    if (!folder) return -errno;
    info->fh = (uintptr_t)folder;
    return 0;
}

static int fs_readdir(const char *path, void *to, fuse_fill_dir_t add, off_t at, struct fuse_file_info *info,
                      enum fuse_readdir_flags how) {
    ENTER();
    DIR *folder = (DIR *)(uintptr_t)info->fh;
    rewinddir(folder);
    for (struct dirent *entry; (entry = readdir(folder));) add(to, entry->d_name, NULL, 0, 0);
    return 0;
}

static int fs_releasedir(const char *path, struct fuse_file_info *info) {
    closedir((DIR *)(uintptr_t)info->fh);
    return 0;
}

static void *fs_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    connection->max_background = 512;  // reads that hang must not keep others from being asked for
    connection->congestion_threshold = 512;
    config->attr_timeout = config->entry_timeout = config->negative_timeout = 0;
    config->nullpath_ok = config->use_ino = 1;
    config->hard_remove = !flags[SILLY_RENAME];
    return NULL;
}

static const struct fuse_operations operations = {
    .init = fs_init, .getattr = fs_getattr, .open = fs_open, .create = fs_create, .read = fs_read, .write = fs_write,
    .flush = fs_flush, .release = fs_release, .fsync = fs_fsync, .unlink = fs_unlink, .mkdir = fs_mkdir, .rmdir = fs_rmdir,
    .rename = fs_rename, .link = fs_link, .truncate = fs_truncate, .fallocate = fs_fallocate, .lseek = fs_lseek,
    .chmod = fs_chmod, .utimens = fs_utimens, .statfs = fs_statfs,
    .opendir = fs_opendir, .readdir = fs_readdir, .releasedir = fs_releasedir,
};

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    below = argv[1];
    snprintf(late, sizeof late, "%s-late", below);
    int fd = open(argv[2], O_RDONLY);
    flags = mmap(NULL, N_FLAGS, PROT_READ, MAP_SHARED, fd, 0);
    if (fd < 0 || flags == MAP_FAILED) return 2;
    argv[2] = argv[0];
    return fuse_main(argc - 2, argv + 2, &operations, NULL);
}
