/* The active slots of a round: where rows stand in the list, and optimiser steps on the vector gathered from it. */
#include <stdlib.h>

#include "plan.h"

static int increasing(const int64_t *slots, int64_t count, int64_t size) {
    if (count == 0) return 1;
    int good = slots[0] >= 0 && slots[count - 1] < size;
    for (int64_t i = 1; i < count; i++) good &= slots[i - 1] < slots[i];
    return good;
}

/* A table over the leading bits of a slot says where in the list to look: a step or two instead of a binary search. */
typedef struct {
    const int64_t *active;
    int64_t count;
    int shift;
    uint32_t *starts; /* starts[b]: the first entry with slot >> shift >= b; one more at the end */
    int64_t buckets;
} directory;

static int make_directory(directory *d, const int64_t *active, int64_t count, int64_t size) {
    *d = (directory){.active = active, .count = count};
    while ((size - 1) >> d->shift > count) d->shift++;
    d->buckets = ((size - 1) >> d->shift) + 1;
    d->starts = malloc(((size_t)d->buckets + 1) * sizeof *d->starts);
    if (!d->starts) return FAIRFOLD_NO_MEMORY;
    int64_t entry = 0;
    for (int64_t bucket = 0; bucket < d->buckets; bucket++) {
        while (entry < count && active[entry] >> d->shift < bucket) entry++;
        d->starts[bucket] = (uint32_t)entry;
    }
    d->starts[d->buckets] = (uint32_t)count;
    return FAIRFOLD_OK;
}

static int64_t find(const directory *d, int64_t slot) {
    const int64_t bucket = slot >> d->shift;
    int64_t low = d->starts[bucket], high = d->starts[bucket + 1];
    while (low < high) {
        const int64_t middle = low + (high - low) / 2;
        if (d->active[middle] < slot)
            low = middle + 1;
        else
            high = middle;
    }
    return low < d->count && d->active[low] == slot ? low : -1;
}

typedef struct {
    directory where;
    fairfold_placed placed;
    int64_t pieces;
    int64_t unit;
    int32_t *positions;
    int8_t *signs;
    int *missing;
} position_job;

static void position_part(const void *argument, int part, int parts) {
    const position_job *job = argument;
    const int64_t start = job->pieces / parts * part;
    const int64_t stop = part + 1 == parts ? job->pieces : job->pieces / parts * (part + 1);
    for (int64_t piece = start; piece < stop; piece++) {
        const int64_t slot = (int64_t)job->placed.spots[piece] * job->unit;
        const int64_t first = find(&job->where, slot), last = first + job->unit - 1;
        /* Sorted and distinct: if the last slot of the piece stands where it must, so do all between. */
        if (first < 0 || last >= job->where.count || job->where.active[last] != slot + job->unit - 1) {
            __atomic_store_n(job->missing, 1, __ATOMIC_RELAXED);
            return;
        }
        for (int64_t k = 0; k < job->unit; k++) {
            job->positions[piece * job->unit + k] = (int32_t)(first + k);
            job->signs[piece * job->unit + k] = job->placed.words[piece] >> k & 1 ? -1 : 1;
        }
    }
}

int fairfold_positions(const fairfold_layout *layout, const fairfold_rows *rows, const int64_t *active,
                       int64_t active_count, int32_t *positions, int8_t *signs, int threads) {
    fairfold_job job;
    int status = fairfold_plan_rows(layout, rows, &job);
    if (status != FAIRFOLD_OK || rows->count == 0) return status;
    const int64_t size = layout->head + layout->tail;
    if (active_count < 0 || active_count > INT32_MAX || (active_count && !active) || !positions || !signs)
        return FAIRFOLD_BAD_ARGUMENT;
    if (!increasing(active, active_count, size)) return FAIRFOLD_BAD_ARGUMENT;
    const uint64_t pieces = (uint64_t)rows->count * job.row_units;
    int missing = 0;
    position_job find_all = {.pieces = (int64_t)pieces, .unit = job.plan.unit, .missing = &missing};
    find_all.positions = positions;
    find_all.signs = signs;
    find_all.placed.spots = malloc(pieces * sizeof(uint32_t));
    find_all.placed.words = malloc(pieces * sizeof(uint32_t));
    status = make_directory(&find_all.where, active, active_count, size);
    if (!find_all.placed.spots || !find_all.placed.words) status = FAIRFOLD_NO_MEMORY;
    if (status == FAIRFOLD_OK) {
        const int parts = fairfold_parts(threads, rows->count * rows->row_size);
        job.target = &find_all.placed;
        fairfold_parallel(parts, fairfold_active_body()->place, &job);
        fairfold_parallel(parts, position_part, &find_all);
        if (missing) status = FAIRFOLD_NOT_ACTIVE;
    }
    free(find_all.placed.spots);
    free(find_all.placed.words);
    free(find_all.where.starts);
    return status;
}

static int within(const int32_t *positions, int64_t count, int64_t size) {
    int bad = 0;
    for (int64_t i = 0; i < count; i++) bad |= positions[i] < 0 || positions[i] >= size;
    return !bad;
}

static int check_positions(int real, const void *a, const void *b, const int32_t *positions, const int8_t *signs,
                           int64_t count, int64_t size) {
    if ((real != 4 && real != 8) || count < 0 || size < 0) return FAIRFOLD_BAD_ARGUMENT;
    if (count && (!a || !b || !positions || !signs)) return FAIRFOLD_BAD_ARGUMENT;
    return within(positions, count, size) ? FAIRFOLD_OK : FAIRFOLD_NOT_ACTIVE;
}

typedef struct {
    int real;
    const void *source;
    void *out;
    const int32_t *positions;
    const int8_t *signs;
    int64_t count;
} recover_job;

static void recover_part(const void *argument, int part, int parts) {
    const recover_job *job = argument;
    const int64_t start = job->count / parts * part;
    const int64_t stop = part + 1 == parts ? job->count : job->count / parts * (part + 1);
    if (job->real == 4)
        for (int64_t i = start; i < stop; i++)
            ((float *)job->out)[i] = ((const float *)job->source)[job->positions[i]] * (float)job->signs[i];
    else
        for (int64_t i = start; i < stop; i++)
            ((double *)job->out)[i] = ((const double *)job->source)[job->positions[i]] * (double)job->signs[i];
}

int fairfold_recover_positions(int real, const void *source, int64_t size, const int32_t *positions,
                               const int8_t *signs, int64_t count, void *out, int threads) {
    int status = check_positions(real, source, out, positions, signs, count, size);
    if (status != FAIRFOLD_OK || count == 0) return status;
    recover_job job = {real, source, out, positions, signs, count};
    fairfold_parallel(fairfold_parts(threads, count), recover_part, &job);
    return FAIRFOLD_OK;
}

int fairfold_accumulate_positions(int real, const void *values, const int32_t *positions, const int8_t *signs,
                                  int64_t count, void *sums, int64_t size) {
    int status = check_positions(real, values, sums, positions, signs, count, size);
    if (status != FAIRFOLD_OK || count == 0) return status;
    if (real == 4)
        for (int64_t i = 0; i < count; i++)
            ((float *)sums)[positions[i]] += ((const float *)values)[i] * (float)signs[i];
    else
        for (int64_t i = 0; i < count; i++)
            ((double *)sums)[positions[i]] += ((const double *)values)[i] * (double)signs[i];
    return FAIRFOLD_OK;
}
