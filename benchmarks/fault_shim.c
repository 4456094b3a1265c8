/* Stands between a program and the C library, and counts the calls that change files
 * below one folder. At the call of a given number it kills the process, or lets the
 * call fail. It can also record every call, with the bytes, for a replay of power loss.
 *
 * Loaded with LD_PRELOAD; a program arms it through shim_arm and shim_record. Calls on
 * files outside the folder pass through untouched.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { OFF, COUNT, KILL, FAIL };
#define FILES 65536

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char root[PATH_MAX];
static size_t root_length;
static int mode = OFF, failure = EIO, record = -1;
static long calls, target;
static char last[PATH_MAX + 64];
static char *names[FILES]; /* Path of each descriptor that is open on a file of ours. */

#define REAL(name) \
    static __typeof__(&name) real; \
    if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static ssize_t raw_write(int fd, const void *data, size_t count) {
    REAL(write);
    return real(fd, data, count);
}

void shim_arm(const char *folder, int new_mode, long new_target, int new_failure) {
    pthread_mutex_lock(&lock);
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    mode = new_mode;
    target = new_target;
    failure = new_failure;
    calls = 0;
    last[0] = 0;
    pthread_mutex_unlock(&lock);
}

void shim_record(int descriptor) { record = descriptor; }
long shim_calls(void) { return calls; }
const char *shim_last(void) { return last; }

static int below(const char *path) {
    return path && root_length && !strncmp(path, root, root_length) &&
           (path[root_length] == '/' || !path[root_length]);
}

/* Absolute form of a path; SQLite and Python give absolute ones, safetensors too. */
static const char *absolute(int folder, const char *path, char *buffer) {
    if (!path || path[0] == '/') return path;
    char base[PATH_MAX];
    if (folder == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return path;
    } else if (folder >= 0 && folder < FILES && names[folder]) {
        snprintf(base, sizeof base, "%s", names[folder]);
    } else {
        return path;
    }
    if (snprintf(buffer, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return path;
    return buffer;
}

/* Counts one call; returns whether it must fail. Does not return if it must kill. */
static int passes(const char *call, const char *path) {
    if (mode == OFF) return 1;
    pthread_mutex_lock(&lock);
    long number = ++calls;
    int hit = number == target;
    if (hit) snprintf(last, sizeof last, "%s %s", call, path + root_length);
    pthread_mutex_unlock(&lock);
    if (hit && mode == KILL) {
        dprintf(2, "killed at %ld: %s\n", number, last);
        kill(getpid(), SIGKILL);
        for (;;) pause();
    }
    if (hit && mode == FAIL) {
        errno = failure;
        return 0;
    }
    return 1;
}

/* Writes one call to the record: a line, then its bytes. */
static void note(const char *call, const char *path, const char *other, long at,
                 const void *data, size_t count) {
    if (record < 0) return;
    char line[2 * PATH_MAX + 128];
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%ld\t%zu\n", call, path,
                          other ? other : "", at, count);
    pthread_mutex_lock(&lock);
    raw_write(record, line, length);
    if (count) raw_write(record, data, count);
    pthread_mutex_unlock(&lock);
}

static void opened(int fd, const char *path, int flags, int fresh) {
    if (fd < 0 || fd >= FILES) return;
    free(names[fd]);
    names[fd] = strdup(path);
    if (fresh) note("create", path, NULL, 0, NULL, 0);
    else if (flags & O_TRUNC) note("truncate", path, NULL, 0, NULL, 0);
}

static int open_any(int folder, const char *path, int flags, mode_t permissions) {
    REAL(openat);
    char buffer[PATH_MAX];
    const char *full = absolute(folder, path, buffer);
    if (!below(full)) return real(folder, path, flags, permissions);
    int fresh = (flags & O_CREAT) && access(full, F_OK) != 0;
    if ((fresh || (flags & O_TRUNC)) && !passes("create", full)) return -1;
    int fd = real(folder, path, flags, permissions);
    opened(fd, full, flags, fresh);
    return fd;
}

#define PERMISSIONS(flags) \
    mode_t permissions = 0; \
    if ((flags) & (O_CREAT | __O_TMPFILE)) { \
        va_list list; va_start(list, flags); \
        permissions = va_arg(list, mode_t); va_end(list); }

int open(const char *path, int flags, ...) {
    PERMISSIONS(flags) return open_any(AT_FDCWD, path, flags, permissions);
}
int open64(const char *path, int flags, ...) {
    PERMISSIONS(flags) return open_any(AT_FDCWD, path, flags, permissions);
}
int openat(int folder, const char *path, int flags, ...) {
    PERMISSIONS(flags) return open_any(folder, path, flags, permissions);
}
int openat64(int folder, const char *path, int flags, ...) {
    PERMISSIONS(flags) return open_any(folder, path, flags, permissions);
}
int __open64_2(const char *path, int flags) {
    return open_any(AT_FDCWD, path, flags, 0);
}
int __open_2(const char *path, int flags) {
    return open_any(AT_FDCWD, path, flags, 0);
}

int close(int fd) {
    REAL(close);
    if (fd >= 0 && fd < FILES && names[fd]) {
        free(names[fd]);
        names[fd] = NULL;
    }
    return real(fd);
}

static const char *ours(int fd) {
    return fd >= 0 && fd < FILES ? names[fd] : NULL;
}

ssize_t write(int fd, const void *data, size_t count) {
    const char *path = ours(fd);
    if (!path) return raw_write(fd, data, count);
    if (!passes("write", path)) return -1;
    off_t at = lseek(fd, 0, SEEK_CUR);
    ssize_t done = raw_write(fd, data, count);
    if (done > 0) note("write", path, NULL, at, data, done);
    return done;
}

static ssize_t pwrite_any(int fd, const void *data, size_t count, off_t at) {
    static ssize_t (*real)(int, const void *, size_t, off_t);
    if (!real) *(void **)&real = dlsym(RTLD_NEXT, "pwrite64");
    const char *path = ours(fd);
    if (path && !passes("write", path)) return -1;
    ssize_t done = real(fd, data, count, at);
    if (path && done > 0) note("write", path, NULL, at, data, done);
    return done;
}
ssize_t pwrite(int fd, const void *data, size_t count, off_t at) {
    return pwrite_any(fd, data, count, at);
}
ssize_t pwrite64(int fd, const void *data, size_t count, off64_t at) {
    return pwrite_any(fd, data, count, at);
}

static ssize_t writev_any(int fd, const struct iovec *parts, int number, off_t at) {
    size_t count = 0;
    for (int i = 0; i < number; i++) count += parts[i].iov_len;
    char *data = malloc(count ? count : 1), *end = data;
    for (int i = 0; i < number; i++) {
        memcpy(end, parts[i].iov_base, parts[i].iov_len);
        end += parts[i].iov_len;
    }
    ssize_t done = at < 0 ? write(fd, data, count) : pwrite_any(fd, data, count, at);
    free(data);
    return done;
}
ssize_t writev(int fd, const struct iovec *parts, int number) {
    REAL(writev);
    return ours(fd) ? writev_any(fd, parts, number, -1) : real(fd, parts, number);
}
ssize_t pwritev(int fd, const struct iovec *parts, int number, off_t at) {
    REAL(pwritev);
    return ours(fd) ? writev_any(fd, parts, number, at) : real(fd, parts, number, at);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int number, off64_t at) {
    REAL(pwritev64);
    return ours(fd) ? writev_any(fd, parts, number, at) : real(fd, parts, number, at);
}
ssize_t pwritev2(int fd, const struct iovec *parts, int number, off_t at, int flags) {
    REAL(pwritev2);
    return ours(fd) ? writev_any(fd, parts, number, at)
                    : real(fd, parts, number, at, flags);
}
ssize_t pwritev64v2(int fd, const struct iovec *parts, int number, off64_t at,
                    int flags) {
    REAL(pwritev64v2);
    return ours(fd) ? writev_any(fd, parts, number, at)
                    : real(fd, parts, number, at, flags);
}

#define SYNC(name) \
    int name(int fd) { \
        REAL(name); \
        const char *path = ours(fd); \
        if (path && !passes("sync", path)) return -1; \
        int done = real(fd); \
        if (path && !done) note("sync", path, NULL, 0, NULL, 0); \
        return done; \
    }
SYNC(fsync)
SYNC(fdatasync)

static int cut(const char *path, off_t size, int done) {
    if (path && !done) note("truncate", path, NULL, size, NULL, 0);
    return done;
}
int ftruncate(int fd, off_t size) {
    REAL(ftruncate);
    const char *path = ours(fd);
    if (path && !passes("truncate", path)) return -1;
    return cut(path, size, real(fd, size));
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int truncate(const char *path, off_t size) {
    REAL(truncate);
    char buffer[PATH_MAX];
    const char *full = absolute(AT_FDCWD, path, buffer);
    if (!below(full)) return real(path, size);
    if (!passes("truncate", full)) return -1;
    return cut(full, size, real(path, size));
}
int truncate64(const char *path, off64_t size) { return truncate(path, size); }

static int remove_any(const char *call, int folder, const char *path, int flags) {
    REAL(unlinkat);
    char buffer[PATH_MAX];
    const char *full = absolute(folder, path, buffer);
    if (!below(full)) return real(folder, path, flags);
    if (!passes(call, full)) return -1;
    int done = real(folder, path, flags);
    if (!done) note(call, full, NULL, 0, NULL, 0);
    return done;
}
int unlink(const char *path) { return remove_any("unlink", AT_FDCWD, path, 0); }
int rmdir(const char *path) {
    return remove_any("rmdir", AT_FDCWD, path, AT_REMOVEDIR);
}
int unlinkat(int folder, const char *path, int flags) {
    return remove_any(flags & AT_REMOVEDIR ? "rmdir" : "unlink", folder, path, flags);
}

static int rename_any(int from_folder, const char *from, int to_folder,
                      const char *to) {
    REAL(renameat);
    char one[PATH_MAX], other[PATH_MAX];
    const char *full_from = absolute(from_folder, from, one);
    const char *full_to = absolute(to_folder, to, other);
    if (!below(full_to)) return real(from_folder, from, to_folder, to);
    if (!passes("rename", full_to)) return -1;
    int done = real(from_folder, from, to_folder, to);
    if (!done) note("rename", full_from, full_to, 0, NULL, 0);
    return done;
}
int rename(const char *from, const char *to) {
    return rename_any(AT_FDCWD, from, AT_FDCWD, to);
}
int renameat(int from_folder, const char *from, int to_folder, const char *to) {
    return rename_any(from_folder, from, to_folder, to);
}

int mkdirat(int folder, const char *path, mode_t permissions) {
    REAL(mkdirat);
    char buffer[PATH_MAX];
    const char *full = absolute(folder, path, buffer);
    if (!below(full)) return real(folder, path, permissions);
    if (!passes("mkdir", full)) return -1;
    int done = real(folder, path, permissions);
    if (!done) note("mkdir", full, NULL, 0, NULL, 0);
    return done;
}
int mkdir(const char *path, mode_t permissions) {
    return mkdirat(AT_FDCWD, path, permissions);
}
