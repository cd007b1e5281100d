/* What a lookup cannot beat: pieces of a vector copied by stored indices, without a hash or a sign. Prints nanoseconds a
 * piece, the least of 24 passes over fresh indices, for several sizes of vector, lengths of piece and prefetches.
 *
 *     cc -O3 -march=native benchmarks/gather_floor.c -o gather_floor && ./gather_floor
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#ifndef MOVED
#define MOVED (1 << 19) /* values a pass; -DMOVED=4194304 for results that the caches do not keep */
#endif
#define SETS 8
#define ROOM 256 /* indices that are prefetched past the end of a pass */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static uint64_t state = 88172645463325252u;
static uint64_t below(uint64_t limit) {
    state ^= state << 13, state ^= state >> 7, state ^= state << 17;
    return ((state >> 32) * limit) >> 32;
}

/* `cache`: 0 no prefetch, else into the first or second cache. */
#define DEFINE(NAME, UNIT, CACHE, AHEAD)                                                              \
    static __attribute__((noinline)) void NAME(const float *from, float *to, const uint32_t *index) { \
        for (int i = 0; i < MOVED / UNIT; i++) {                                                      \
            const float *ahead = from + (size_t)index[i + AHEAD] * UNIT;                              \
            if (CACHE == 1) __builtin_prefetch(ahead, 0, 3);                                          \
            if (CACHE == 2) __builtin_prefetch(ahead, 0, 2);                                          \
            memcpy(to + (size_t)i * UNIT, from + (size_t)index[i] * UNIT, UNIT * sizeof(float));      \
        }                                                                                             \
    }
#define DEFINE_ALL(UNIT)              \
    DEFINE(none_##UNIT, UNIT, 0, 0)   \
    DEFINE(near_##UNIT, UNIT, 1, 16)  \
    DEFINE(far_##UNIT, UNIT, 1, 128)  \
    DEFINE(near2_##UNIT, UNIT, 2, 16) \
    DEFINE(far2_##UNIT, UNIT, 2, 128) \
    DEFINE(farther2_##UNIT, UNIT, 2, 256)
DEFINE_ALL(1)
DEFINE_ALL(8)
DEFINE_ALL(16)

typedef void (*gather)(const float *, float *, const uint32_t *);
#define ALL(UNIT) {none_##UNIT, near_##UNIT, far_##UNIT, near2_##UNIT, far2_##UNIT, farther2_##UNIT}

int main(void) {
    static const gather gathers[3][6] = {ALL(1), ALL(8), ALL(16)};
    static const int units[] = {1, 8, 16};
    printf("vector  piece   none  L1/16 L1/128  L2/16 L2/128 L2/256   (cache / pieces ahead)\n");
    for (size_t megabytes = 1; megabytes <= 128; megabytes *= 2) {
        const size_t bytes = megabytes << 20;
        float *from = aligned_alloc(1 << 21, bytes < 1 << 21 ? 1 << 21 : bytes), *to = malloc(MOVED * sizeof(float));
        uint32_t *index = malloc(SETS * (MOVED + ROOM) * sizeof *index);
        if (!from || !to || !index) return 1;
        madvise(from, bytes, MADV_HUGEPAGE);
        memset(from, 1, bytes);
        memset(to, 1, MOVED * sizeof(float));
        for (int u = 0; u < 3; u++) {
            const int pieces = MOVED / units[u];
            for (int i = 0; i < SETS * (pieces + ROOM); i++)
                index[i] = (uint32_t)below(bytes / sizeof(float) / (size_t)units[u]);
            printf("%3zu MB  %5d", megabytes, units[u]);
            double best[6] = {1, 1, 1, 1, 1, 1};
            for (int pass = 0; pass < 24; pass++)
                for (int v = 0; v < 6; v++) {
                    const double begin = now();
                    gathers[u][v](from, to, index + (size_t)((pass + v) % SETS) * (size_t)(pieces + ROOM));
                    const double spent = now() - begin;
                    if (spent < best[v]) best[v] = spent;
                }
            for (int v = 0; v < 6; v++) printf(" %6.2f", best[v] * 1e9 / pieces);
            printf("\n");
        }
        free(from), free(to), free(index);
    }
    return 0;
}
