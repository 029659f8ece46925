// A FUSE file system over a folder, several mounts of which behave like clients of a network file system: a test double.
//
//     stale_fs FOLDER CONTROL MOUNTPOINT [FUSE options]
//
// CONTROL is a file of 128 bytes that the test reads and changes; all mounts may share one. Bytes 0-15 are switches:
//
//     0  write-behind: what is written to a segment (*.kvseg) reaches FOLDER with fsync or the last close, and is seen
//        through other mounts only by descriptors that are opened after that
//     1  fallocate is not supported
//     2  segments are away: ENOENT, and no folder lists them
//     3  fsync of a segment fails with this errno
//     4  so does a write of more than one page to a segment
//
// From byte 64 on, 64-bit counters of calls for segments: fsync, write, fallocate that was done.
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <fuse3/fuse.h>
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

enum { WRITE_BEHIND, NO_FALLOCATE, AWAY, FAIL_FSYNC, FAIL_WRITE };
enum { N_FSYNC, N_WRITE, N_FALLOCATE };
static volatile unsigned char *control;
static const char *below;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void count(int which) { __atomic_fetch_add((uint64_t *)(control + 64) + which, 1, __ATOMIC_RELAXED); }

typedef struct Range {
    struct Range *next;
    off_t at;
    size_t n;
    char bytes[];
} Range;

// A segment as this mount sees it: what lay below when it was opened last, and what was written here since.
typedef struct Node {
    struct Node *next;
    char path[PATH_MAX];
    int cache, base, opens;
    Range *first, **last;
} Node;
static Node *nodes;

typedef struct {
    int fd;
    Node *node;
} Handle;

#define HANDLE(info) ((Handle *)(uintptr_t)(info)->fh)
#define REAL(name, path) \
    char name[PATH_MAX]; \
    snprintf(name, sizeof name, "%s%s", below, path)
#define RESULT(call) ((call) < 0 ? -errno : 0)

static int is_segment(const char *path) {
    const char *dot = path ? strrchr(path, '.') : NULL;
    return dot && !strcmp(dot, ".kvseg");
}
static int is_away(const char *path) { return control[AWAY] && is_segment(path); }

static void refresh(Node *node) {
    static char piece[1 << 20];
    ssize_t n;
    if (ftruncate(node->cache, 0)) abort();
    for (off_t at = 0; (n = pread(node->base, piece, sizeof piece, at)) > 0; at += n)
        if (pwrite(node->cache, piece, n, at) != n) abort();
    for (Range *part = node->first; part; part = part->next)
        if (pwrite(node->cache, part->bytes, part->n, part->at) < 0) abort();
}

static int write_back(Node *node) {
    for (Range *part; (part = node->first);) {
        if (pwrite(node->base, part->bytes, part->n, part->at) < 0) return -errno;
        node->first = part->next;
        free(part);
    }
    node->last = &node->first;
    return 0;
}

static void open_node(Handle *handle, const char *path) {
    Node *node = nodes;
    while (node && strcmp(node->path, path)) node = node->next;
    if (!node) {
        node = calloc(1, sizeof *node);
        snprintf(node->path, sizeof node->path, "%s", path);
        node->cache = memfd_create("segment", 0);
        char self[64];
        snprintf(self, sizeof self, "/proc/self/fd/%d", handle->fd);
        node->base = open(self, O_RDWR);
        node->last = &node->first;
        node->next = nodes;
        nodes = node;
    }
    node->opens++;
    refresh(node);
    handle->node = node;
}

static int open_real(const char *path, struct fuse_file_info *info, int flags_more, mode_t mode) {
    REAL(real, path);
    if (is_away(path)) return -ENOENT;
    int fd = open(real, (info->flags & ~O_DIRECT) | flags_more, mode);
    if (fd < 0) return -errno;
    Handle *handle = calloc(1, sizeof *handle);
    handle->fd = fd;
    if (control[WRITE_BEHIND] && is_segment(path)) {
        pthread_mutex_lock(&lock);
        open_node(handle, path);
        pthread_mutex_unlock(&lock);
    }
    info->fh = (uintptr_t)handle;
    info->direct_io = 1;
    return 0;
}

static int fs_open(const char *path, struct fuse_file_info *info) { return open_real(path, info, 0, 0); }
static int fs_create(const char *path, mode_t mode, struct fuse_file_info *info) {
    return open_real(path, info, O_CREAT, mode);
}

static int fs_release(const char *path, struct fuse_file_info *info) {
    Handle *handle = HANDLE(info);
    pthread_mutex_lock(&lock);
    if (handle->node && --handle->node->opens == 0) {
        Node **at = &nodes;
        while (*at != handle->node) at = &(*at)->next;
        *at = handle->node->next;
        write_back(handle->node);
        close(handle->node->base);
        close(handle->node->cache);
        free(handle->node);
    }
    pthread_mutex_unlock(&lock);
    close(handle->fd);
    free(handle);
    return 0;
}

static int fs_read(const char *path, char *to, size_t n, off_t at, struct fuse_file_info *info) {
    Handle *handle = HANDLE(info);
    ssize_t done = pread(handle->node ? handle->node->cache : handle->fd, to, n, at);
    return done < 0 ? -errno : (int)done;
}

static int fs_write(const char *path, const char *from, size_t n, off_t at, struct fuse_file_info *info) {
    Handle *handle = HANDLE(info);
    if (is_segment(path)) {
        count(N_WRITE);
        if (control[FAIL_WRITE] && n > 4096) return -control[FAIL_WRITE];
    }
    if (!handle->node) {
        ssize_t done = pwrite(handle->fd, from, n, at);
        return done < 0 ? -errno : (int)done;
    }
    Range *part = malloc(sizeof *part + n);
    *part = (Range){NULL, at, n};
    memcpy(part->bytes, from, n);
    pthread_mutex_lock(&lock);
    ssize_t done = pwrite(handle->node->cache, from, n, at);
    *handle->node->last = part;
    handle->node->last = &part->next;
    pthread_mutex_unlock(&lock);
    return (int)done;
}

static int fs_fsync(const char *path, int only_data, struct fuse_file_info *info) {
    Handle *handle = HANDLE(info);
    if (is_segment(path)) {
        count(N_FSYNC);
        if (control[FAIL_FSYNC]) return -control[FAIL_FSYNC];
    }
    if (!handle->node) return 0;
    pthread_mutex_lock(&lock);
    int result = write_back(handle->node);
    pthread_mutex_unlock(&lock);
    return result;
}

static int resized(struct fuse_file_info *info, int result) {
    struct stat found;
    Handle *handle = HANDLE(info);
    if (handle->node && result == 0 && (fstat(handle->fd, &found) || ftruncate(handle->node->cache, found.st_size)))
        return -errno;
    return result;
}

static int fs_truncate(const char *path, off_t size, struct fuse_file_info *info) {
    if (info) return resized(info, RESULT(ftruncate(HANDLE(info)->fd, size)));
    REAL(real, path);
    return RESULT(truncate(real, size));
}

static int fs_fallocate(const char *path, int how, off_t at, off_t n, struct fuse_file_info *info) {
    if (control[NO_FALLOCATE]) return -EOPNOTSUPP;
    if (is_segment(path)) count(N_FALLOCATE);
    return resized(info, RESULT(fallocate(HANDLE(info)->fd, how, at, n)));
}

static int fs_getattr(const char *path, struct stat *found, struct fuse_file_info *info) {
    if (info) return RESULT(fstat(HANDLE(info)->fd, found));
    REAL(real, path);
    return is_away(path) ? -ENOENT : RESULT(lstat(real, found));
}

static int fs_unlink(const char *path) {
    REAL(real, path);
    if (is_away(path)) return -ENOENT;
    pthread_mutex_lock(&lock);
    for (Node *node = nodes; node; node = node->next)
        if (!strcmp(node->path, path)) node->path[0] = 0;
    pthread_mutex_unlock(&lock);
    return RESULT(unlink(real));
}

static int fs_mkdir(const char *path, mode_t mode) {
    REAL(real, path);
    return RESULT(mkdir(real, mode));
}

static int fs_rmdir(const char *path) {
    REAL(real, path);
    return RESULT(rmdir(real));
}

static int fs_rename(const char *from, const char *to, unsigned how) {
    REAL(old, from);
    REAL(new, to);
    return RESULT(renameat2(AT_FDCWD, old, AT_FDCWD, new, how));
}

static int fs_link(const char *from, const char *to) {
    REAL(old, from);
    REAL(new, to);
    return RESULT(link(old, new));
}

static int fs_chmod(const char *path, mode_t mode, struct fuse_file_info *info) {
    REAL(real, path);
    return RESULT(chmod(real, mode));
}

static int fs_utimens(const char *path, const struct timespec times[2], struct fuse_file_info *info) {
    if (info) return RESULT(futimens(HANDLE(info)->fd, times));
    REAL(real, path);
    return RESULT(utimensat(AT_FDCWD, real, times, AT_SYMLINK_NOFOLLOW));
}

static int fs_statfs(const char *path, struct statvfs *found) { return RESULT(statvfs(below, found)); }

static int fs_readdir(const char *path, void *to, fuse_fill_dir_t add, off_t at, struct fuse_file_info *info,
                      enum fuse_readdir_flags how) {
    REAL(real, path);
    DIR *folder = opendir(real);
    if (!folder) return -errno;
    for (struct dirent *entry; (entry = readdir(folder));)
        if (!is_away(entry->d_name)) add(to, entry->d_name, NULL, 0, 0);
    closedir(folder);
    return 0;
}

static void *fs_init(struct fuse_conn_info *connection, struct fuse_config *config) {
    config->attr_timeout = config->entry_timeout = config->negative_timeout = 0;
    config->hard_remove = config->use_ino = 1;
    return NULL;
}

static const struct fuse_operations operations = {
    .init = fs_init, .getattr = fs_getattr, .open = fs_open, .create = fs_create, .read = fs_read, .write = fs_write,
    .release = fs_release, .fsync = fs_fsync, .unlink = fs_unlink, .mkdir = fs_mkdir, .rmdir = fs_rmdir,
    .rename = fs_rename, .link = fs_link, .truncate = fs_truncate, .fallocate = fs_fallocate, .chmod = fs_chmod,
    .utimens = fs_utimens, .statfs = fs_statfs, .readdir = fs_readdir,
};

int main(int argc, char **argv) {
    if (argc < 4) return 2;
    below = argv[1];
    int fd = open(argv[2], O_RDWR);
    control = mmap(NULL, 128, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd < 0 || control == MAP_FAILED) return 2;
    argv[2] = argv[0];
    return fuse_main(argc - 2, argv + 2, &operations, NULL);
}
