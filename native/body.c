/* All loops, compiled once for every instruction set with FAIRFOLD_BODY naming it. */
#include <math.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX__
#include <immintrin.h>
#endif

#include "plan.h"
#include "walk.h"

#ifndef FAIRFOLD_BODY
#define FAIRFOLD_BODY portable
#endif
#define JOIN_AGAIN(a, b) a##b
#define JOIN(a, b) JOIN_AGAIN(a, b)
#define TEXT_AGAIN(a) #a
#define TEXT(a) TEXT_AGAIN(a)

static inline uint32_t spot_boundary(const fairfold_plan *plan, int part, int parts) {
    uint64_t each = plan->spots / (uint64_t)parts, left = plan->spots % (uint64_t)parts, number = (uint64_t)part;
    return (uint32_t)(each * number + (number < left ? number : left));
}

/* All pieces of the job that land in this part's range of spots. */
static inline walk walk_spots(const fairfold_job *job, int part, int parts) {
    walk w = walk_part(job, 0, 1);
    if (parts > 1) {
        w.first_spot = spot_boundary(&job->plan, part, parts);
        w.spots = spot_boundary(&job->plan, part + 1, parts) - w.first_spot;
        if (!w.spots) w.row = w.row_stop; /* more parts than spots: nothing is left for this one */
    }
    return w;
}

static inline void share(int64_t work, int part, int parts, int64_t *start, int64_t *stop) {
    int64_t each = work / parts, left = work % parts;
    *start = each * part + (part < left ? part : left);
    *stop = *start + each + (part < left);
}

static inline void count_piece(const fairfold_job *job, uint32_t spot) {
    if (!job->counts_each) {
        job->counts[spot]++;
        return;
    }
    const size_t unit = job->plan.unit;
    for (size_t k = 0; k < unit; k++) job->counts[spot * unit + k]++;
}

static inline float float_root(float value) { return sqrtf(value); }
static inline double double_root(double value) { return sqrt(value); }
static inline float float_exp(float value) { return expf(value); }
static inline double double_exp(double value) { return exp(value); }

#define REAL float
#define BITS uint32_t
#define NAME(x) float_##x
#include "move.inc"
#include "plain.inc"
#include "lazy.inc"
#include "train.inc"
#undef REAL
#undef BITS
#undef NAME

#define REAL double
#define BITS uint64_t
#define NAME(x) double_##x
#include "move.inc"
#include "plain.inc"
#include "lazy.inc"
#include "train.inc"
#undef REAL
#undef BITS
#undef NAME

/* Counts fold as sums do. They are added as unsigned words: no overflow is undefined. */
static void int_fold(const void *argument, int part, int parts) {
    const fairfold_plain_job *job = argument;
    int64_t start, stop;
    share(job->size / job->chunk, part, parts, &start, &stop);
    const uint32_t *source = (const uint32_t *)job->source + start * job->repeats * job->chunk;
    uint32_t *target = (uint32_t *)job->target + start * job->chunk;
    for (int64_t group = start; group < stop; group++, target += job->chunk) {
        for (int64_t k = 0; k < job->chunk; k++) target[k] = 0;
        for (int64_t r = 0; r < job->repeats; r++, source += job->chunk)
            for (int64_t k = 0; k < job->chunk; k++) target[k] += source[k];
    }
}

static void count(const void *argument, int part, int parts) {
    const fairfold_job *job = argument;
    walk w = walk_spots(job, part, parts);
    batch b;
    walk_start(&w, &b);
    while (walk_next(&w, &b))
        for (int i = 0; i < b.count; i++) count_piece(job, b.spot[i]);
}

static void place(const void *argument, int part, int parts) {
    const fairfold_job *job = argument;
    const fairfold_placed *placed = job->target;
    walk w = walk_part(job, part, parts);
    batch b;
    walk_start(&w, &b);
    while (walk_next(&w, &b)) {
        memcpy(placed->spots + b.ordinal, b.spot, (size_t)b.count * sizeof(uint32_t));
        if (placed->words) memcpy(placed->words + b.ordinal, b.word, (size_t)b.count * sizeof(uint32_t));
    }
}

#include "packed.inc"

extern const fairfold_body JOIN(fairfold_body_, FAIRFOLD_BODY);
const fairfold_body JOIN(fairfold_body_, FAIRFOLD_BODY) = {
    .name = TEXT(FAIRFOLD_BODY),
    .gather = {float_gather, double_gather},
    .scatter = {float_scatter, double_scatter},
    .count = count,
    .place = place,
    .fold = {float_fold, double_fold, int_fold},
    .unfold = {float_unfold, double_unfold},
    .packed_products = packed_products,
    .packed_sum = packed_sum,
    .train = {float_train, double_train},
};
