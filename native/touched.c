/* Work that follows the slots of a batch and never the size of the compact vector. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

#define DIGIT 11
#define BUCKETS (1 << DIGIT)
#define AHEAD 12 /* entries fetched before they are needed */

/* Sort by the upper word, keeping the order of equals: one pass for every 11 bits of the largest key. Returns whichever
 * of the two arrays holds the result. */
static uint64_t *sort(uint64_t *entries, uint64_t *other, size_t count, uint64_t keys) {
    static const uint64_t mask = BUCKETS - 1;
    for (int shift = 32; shift < 64 && (keys - 1) >> (shift - 32); shift += DIGIT) {
        size_t starts[BUCKETS] = {0};
        for (size_t i = 0; i < count; i++) starts[entries[i] >> shift & mask]++;
        size_t sum = 0;
        for (int bucket = 0; bucket < BUCKETS; bucket++) {
            size_t here = starts[bucket];
            starts[bucket] = sum;
            sum += here;
        }
        for (size_t i = 0; i < count; i++) other[starts[entries[i] >> shift & mask]++] = entries[i];
        uint64_t *swap = entries;
        entries = other;
        other = swap;
    }
    return entries;
}

typedef struct {
    fairfold_placed placed;
    uint64_t *buffers[2];
    uint64_t *entries; /* spot << 32 | piece, sorted */
    size_t count;
} batch_slots;

static void release(batch_slots *batch) {
    free(batch->placed.spots);
    free(batch->placed.words);
    free(batch->buffers[0]);
    free(batch->buffers[1]);
}

static int place_sorted(fairfold_job *job, batch_slots *batch) {
    const uint64_t count = (uint64_t)job->row_count * job->row_units;
    *batch = (batch_slots){.count = (size_t)count};
    if (count > UINT32_MAX) return FAIRFOLD_UNSUPPORTED;
    batch->placed.spots = malloc(batch->count * sizeof(uint32_t));
    batch->placed.words = malloc(batch->count * sizeof(uint32_t));
    if (!batch->placed.spots || !batch->placed.words) return FAIRFOLD_NO_MEMORY;
    job->target = &batch->placed;
    fairfold_parallel(1, fairfold_active_body()->place, job);
    for (int i = 0; i < 2; i++) {
        batch->buffers[i] = malloc(batch->count * sizeof(uint64_t));
        if (!batch->buffers[i]) return FAIRFOLD_NO_MEMORY;
    }
    for (size_t i = 0; i < batch->count; i++) batch->buffers[0][i] = (uint64_t)batch->placed.spots[i] << 32 | i;
    batch->entries = sort(batch->buffers[0], batch->buffers[1], batch->count, job->plan.spots);
    return FAIRFOLD_OK;
}

/* The sum of all pieces of one spot, from entry `at` on, in the order of the batch; returns the entry after them. */
#define DEFINE_SUM(REAL, NAME)                                                                                \
    static size_t NAME(const batch_slots *batch, const REAL *values, size_t unit, size_t at, REAL *sum) {     \
        const uint64_t spot = batch->entries[at] >> 32;                                                       \
        for (size_t k = 0; k < unit; k++) sum[k] = 0;                                                         \
        for (; at < batch->count && batch->entries[at] >> 32 == spot; at++) {                                 \
            const size_t piece = (uint32_t)batch->entries[at];                                                \
            const REAL *from = values + piece * unit;                                                         \
            const uint32_t word = batch->placed.words[piece];                                                 \
            if (at + AHEAD < batch->count)                                                                    \
                __builtin_prefetch(values + (uint32_t)batch->entries[at + AHEAD] * unit);                     \
            for (size_t k = 0; k < unit; k++) sum[k] += word >> k & 1 ? -from[k] : from[k];                   \
        }                                                                                                     \
        return at;                                                                                            \
    }
DEFINE_SUM(float, sum_float)
DEFINE_SUM(double, sum_double)

static void touched_sums(const batch_slots *batch, int real, const void *values, size_t unit, int64_t *slots,
                         void *sums, int64_t *touched) {
    size_t written = 0;
    for (size_t at = 0; at < batch->count; written += unit) {
        const int64_t slot = (int64_t)((batch->entries[at] >> 32) * unit);
        for (size_t k = 0; k < unit; k++) slots[written + k] = slot + (int64_t)k;
        at = real == 4 ? sum_float(batch, values, unit, at, (float *)sums + written)
                       : sum_double(batch, values, unit, at, (double *)sums + written);
    }
    *touched = (int64_t)written;
}

int fairfold_touched_rows(const fairfold_layout *layout, int real, const void *values, const fairfold_rows *rows,
                          int64_t *slots, void *sums, int64_t capacity, int64_t *touched) {
    fairfold_job job;
    int status = fairfold_plan_rows(layout, rows, &job);
    if (status != FAIRFOLD_OK) return status;
    if (!touched || (real != 4 && real != 8) || capacity < rows->count * rows->row_size) return FAIRFOLD_BAD_ARGUMENT;
    if (rows->count == 0) {
        *touched = 0;
        return FAIRFOLD_OK;
    }
    if (!slots || !values || !sums) return FAIRFOLD_BAD_ARGUMENT;
    batch_slots batch;
    status = place_sorted(&job, &batch);
    if (status == FAIRFOLD_OK) touched_sums(&batch, real, values, job.plan.unit, slots, sums, touched);
    release(&batch);
    return status;
}
