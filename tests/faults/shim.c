/* What stands between a program and its disk, for tests: preloaded, it counts the calls by which files below one folder
 * are opened, changed, made durable or removed, and at one of them kills the program, tears a write, or refuses.
 *
 * It can also write down every one of those calls with its bytes. From such a trace tests/faults/disk.py works out what
 * a disk may hold after a kill or a power loss at any of them.
 *
 * A process is armed by faults_arm (called through ctypes in a child that was just forked) or by the environment:
 * FAULTS_FOLDER, FAULTS_MODE, FAULTS_AT. Until then every call goes straight through.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum { NOTHING, KILL, TEAR, NO_ROOM, BROKEN, FULL_FROM_HERE, BROKEN_FROM_HERE };
enum { MARK, OPEN, WRITE, SYNC, RENAME, UNLINK, MKDIR, TRUNCATE, RMDIR };
#define FILES 4096

static char folder[PATH_MAX];
static size_t folder_length;
static int mode, trace = -1;
static long at, calls;
static char *paths[FILES]; /* of open files below the folder, by descriptor */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(name, type, ...) \
    static type (*real)(__VA_ARGS__); \
    if (!real) real = (type(*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static ssize_t put(int descriptor, const void *data, size_t size) {
    REAL("write", ssize_t, int, const void *, size_t);
    return real(descriptor, data, size);
}

static void put_all(const void *data, size_t size) {
    const char *left = data;
    while (size) {
        ssize_t done = put(trace, left, size);
        if (done <= 0) _exit(97);
        left += done;
        size -= (size_t)done;
    }
}

/* One line of the trace: kind, flags or offset, lengths, then two names and the bytes. */
static void note(int kind, int64_t number, const char *first, const char *second, const void *data, size_t size) {
    if (trace < 0) return;
    int64_t head[5] = {kind, number, (int64_t)strlen(first), (int64_t)strlen(second), (int64_t)size};
    put_all(head, sizeof head);
    put_all(first, strlen(first));
    put_all(second, strlen(second));
    put_all(data, size);
}

void faults_arm(const char *below, int how, long when, int trace_descriptor) {
    if (!realpath(below, folder)) _exit(98);
    folder_length = strlen(folder);
    mode = how, at = when, trace = trace_descriptor, calls = 0;
}

long faults_disarm(void) {
    folder_length = 0;
    trace = -1;
    mode = NOTHING;
    return calls;
}

void faults_mark(const char *words) {
    pthread_mutex_lock(&lock);
    note(MARK, calls, words, "", "", 0);
    pthread_mutex_unlock(&lock);
}

__attribute__((constructor)) static void from_environment(void) {
    const char *below = getenv("FAULTS_FOLDER"), *how = getenv("FAULTS_MODE"), *when = getenv("FAULTS_AT");
    if (below && how && when) faults_arm(below, atoi(how), atol(when), -1);
}

/* The absolute name where it is below the folder, else NULL. What is named need not exist. */
static const char *below(const char *path, char *buffer) {
    if (!folder_length || !path) return NULL;
    if (path[0] == '/') {
        if (strlen(path) >= PATH_MAX) return NULL;
        strcpy(buffer, path);
    } else {
        if (!getcwd(buffer, PATH_MAX)) return NULL;
        size_t length = strlen(buffer);
        if (length + strlen(path) + 2 > PATH_MAX) return NULL;
        snprintf(buffer + length, PATH_MAX - length, "/%s", path);
    }
    size_t length = strlen(buffer);
    while (length > 1 && buffer[length - 1] == '/') buffer[--length] = 0;
    if (strncmp(buffer, folder, folder_length)) return NULL;
    return buffer[folder_length] == '/' || !buffer[folder_length] ? buffer : NULL;
}

static const char *name_of(int descriptor) {
    return folder_length && descriptor >= 0 && descriptor < FILES ? paths[descriptor] : NULL;
}

/* Count a call; true where it is refused, with errno set. Does not return where it is the last. */
static int refused(int tears) {
    calls++;
    if (calls == at && (mode == KILL || (mode == TEAR && !tears))) kill(getpid(), SIGKILL), pause();
    if (calls == at && mode == NO_ROOM) return errno = ENOSPC;
    if (calls == at && mode == BROKEN) return errno = EIO;
    if (calls >= at && mode == FULL_FROM_HERE) return errno = ENOSPC;
    if (calls >= at && mode == BROKEN_FROM_HERE) return errno = EIO;
    return 0;
}

static int opened(const char *name, int flags, int descriptor) {
    if (descriptor >= 0 && descriptor < FILES) {
        free(paths[descriptor]);
        paths[descriptor] = strdup(name);
        note(OPEN, flags, name, "", "", 0);
    }
    return descriptor;
}

#define OPENING(symbol, prototype, call, types) \
    int symbol prototype { \
        REAL(#symbol, int, types); \
        mode_t rights = 0; \
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_list more; \
            va_start(more, flags); \
            rights = va_arg(more, mode_t); \
            va_end(more); \
        } \
        char buffer[PATH_MAX]; \
        const char *name = below(path, buffer); \
        if (!name) return call; \
        pthread_mutex_lock(&lock); \
        int found = refused(0) ? -1 : call; \
        int kept = errno; \
        opened(name, flags, found); \
        pthread_mutex_unlock(&lock); \
        errno = kept; \
        return found; \
    }
#define WITH_FOLDER int, const char *, int, ...
#define PLAIN const char *, int, ...
OPENING(open, (const char *path, int flags, ...), real(path, flags, rights), PLAIN)
OPENING(open64, (const char *path, int flags, ...), real(path, flags, rights), PLAIN)
OPENING(openat, (int from, const char *path, int flags, ...), real(from, path, flags, rights), WITH_FOLDER)
OPENING(openat64, (int from, const char *path, int flags, ...), real(from, path, flags, rights), WITH_FOLDER)

int close(int descriptor) {
    REAL("close", int, int);
    if (descriptor >= 0 && descriptor < FILES && paths[descriptor]) {
        pthread_mutex_lock(&lock);
        free(paths[descriptor]);
        paths[descriptor] = NULL;
        pthread_mutex_unlock(&lock);
    }
    return real(descriptor);
}

static int64_t place_of(int descriptor) {
    struct stat found;
    if (fcntl(descriptor, F_GETFL) & O_APPEND) return fstat(descriptor, &found) ? 0 : found.st_size;
    return lseek(descriptor, 0, SEEK_CUR);
}

ssize_t write(int descriptor, const void *data, size_t size) {
    const char *name = name_of(descriptor);
    if (!name) return put(descriptor, data, size);
    pthread_mutex_lock(&lock);
    ssize_t done = -1;
    if (!refused(1)) {
        int64_t place = place_of(descriptor);
        int torn = mode == TEAR && calls == at;
        done = put(descriptor, data, torn ? size / 2 : size);
        if (torn) kill(getpid(), SIGKILL), pause();
        if (done > 0) note(WRITE, place, name, "", data, (size_t)done);
    }
    int kept = errno;
    pthread_mutex_unlock(&lock);
    errno = kept;
    return done;
}

ssize_t writev(int descriptor, const struct iovec *parts, int count) {
    REAL("writev", ssize_t, int, const struct iovec *, int);
    if (!name_of(descriptor)) return real(descriptor, parts, count);
    return count ? write(descriptor, parts[0].iov_base, parts[0].iov_len) : 0; /* a short write is a write */
}

#define SYNCING(symbol) \
    int symbol(int descriptor) { \
        REAL(#symbol, int, int); \
        const char *name = name_of(descriptor); \
        if (!name) return real(descriptor); \
        pthread_mutex_lock(&lock); \
        int found = refused(0) ? -1 : real(descriptor); \
        int kept = errno; \
        if (!found) note(SYNC, 0, name, "", "", 0); \
        pthread_mutex_unlock(&lock); \
        errno = kept; \
        return found; \
    }
SYNCING(fsync)
SYNCING(fdatasync)

int ftruncate(int descriptor, off_t size) {
    REAL("ftruncate", int, int, off_t);
    const char *name = name_of(descriptor);
    if (!name) return real(descriptor, size);
    pthread_mutex_lock(&lock);
    int found = refused(0) ? -1 : real(descriptor, size);
    int kept = errno;
    if (!found) note(TRUNCATE, size, name, "", "", 0);
    pthread_mutex_unlock(&lock);
    errno = kept;
    return found;
}

#define NAMING(kind, symbol, prototype, types, first_path, second_path, call) \
    int symbol prototype { \
        REAL(#symbol, int, types); \
        char one[PATH_MAX], two[PATH_MAX]; \
        const char *first = below(first_path, one), *second = below(second_path, two); \
        if (!first) return call; \
        pthread_mutex_lock(&lock); \
        int found = refused(0) ? -1 : call; \
        int kept = errno; \
        if (!found) note(kind, 0, first, second ? second : "", "", 0); \
        pthread_mutex_unlock(&lock); \
        errno = kept; \
        return found; \
    }
#define TWO const char *, const char *
#define TWO_AT int, const char *, int, const char *
#define NAME_AND_RIGHTS const char *, mode_t
#define NAME_AND_RIGHTS_AT int, const char *, mode_t
#define NAME_AT int, const char *, int
NAMING(RENAME, rename, (const char *old, const char *new), TWO, old, new, real(old, new))
NAMING(RENAME, renameat, (int a, const char *old, int b, const char *new), TWO_AT, old, new, real(a, old, b, new))
NAMING(UNLINK, unlink, (const char *path), const char *, path, NULL, real(path))
NAMING(UNLINK, unlinkat, (int from, const char *path, int flags), NAME_AT, path, NULL, real(from, path, flags))
NAMING(MKDIR, mkdir, (const char *path, mode_t rights), NAME_AND_RIGHTS, path, NULL, real(path, rights))
NAMING(MKDIR, mkdirat, (int from, const char *path, mode_t rights), NAME_AND_RIGHTS_AT, path, NULL, real(from, path, rights))
NAMING(RMDIR, rmdir, (const char *path), const char *, path, NULL, real(path))
