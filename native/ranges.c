/* Entries that walk rows or ranges: where coordinates live, recover, accumulate, count. */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

static int real_index(int real) { return real == 4 ? 0 : real == 8 ? 1 : -1; }

int fairfold_slots_and_signs(const fairfold_layout *layout, const int64_t *coordinates, int64_t count, int64_t *slots,
                             int8_t *signs) {
    /* A coordinate is a row of one: the placing that all other entries use is the one under test. */
    const fairfold_rows rows = {coordinates, 8, count, 1};
    fairfold_job job;
    int status = fairfold_plan_rows(layout, &rows, &job);
    if (status != FAIRFOLD_OK || count == 0) return status;
    if (!slots || !signs) return FAIRFOLD_BAD_ARGUMENT;
    fairfold_placed placed = {malloc((size_t)count * 4), malloc((size_t)count * 4)};
    if (placed.spots && placed.words) {
        job.target = &placed;
        fairfold_active_body()->place(&job, 0, 1);
        for (int64_t i = 0; i < count; i++) {
            slots[i] = placed.spots[i];
            signs[i] = placed.words[i] & 1 ? -1 : 1;
        }
    } else {
        status = FAIRFOLD_NO_MEMORY;
    }
    free(placed.spots);
    free(placed.words);
    return status;
}

/* Parts that scatter each hash every piece, and keep those of their own slots. With single values, or sums beyond the
 * last cache, two take less time than one. Otherwise one thread reads about as fast as memory gives, and two or three do
 * no better (docs/speed.md). */
#define WORTH_SCATTERING 4
#define WIDE_PIECE 32
#define LAST_CACHE (1 << 25)
static int64_t scatter_threads(int64_t threads, int64_t piece_bytes, int64_t sums_bytes) {
    const int memory_bound = piece_bytes >= WIDE_PIECE && sums_bytes <= LAST_CACHE;
    return threads < WORTH_SCATTERING && memory_bound ? 1 : threads;
}

static void move_rows(const fairfold_move *move, int64_t threads, const fairfold_part *loops, const fairfold_job *job) {
    const int parts = fairfold_parts(threads, move->rows.count * move->rows.row_size);
    fairfold_parallel(parts, loops[real_index((int)move->real)], job);
}

int fairfold_recover_rows(const fairfold_move *move) {
    fairfold_job job;
    const int status = fairfold_plan_move(move, &job);
    if (status != FAIRFOLD_OK || job.row_count == 0) return status;
    job.source = move->compact;
    job.target = move->values;
    move_rows(move, move->threads, fairfold_active_body()->gather, &job);
    return FAIRFOLD_OK;
}

int fairfold_accumulate_rows(const fairfold_move *move, double scale) {
    fairfold_job job;
    const int status = fairfold_plan_move(move, &job);
    if (status != FAIRFOLD_OK || job.row_count == 0) return status;
    job.source = move->values;
    job.target = move->compact;
    job.scale = scale;
    const int64_t threads = scatter_threads(move->threads, job.plan.unit * move->real, move->size * move->real);
    move_rows(move, threads, fairfold_active_body()->scatter, &job);
    return FAIRFOLD_OK;
}

/* A range in four runs: owned slots, then hashed ones up to a whole piece, in whole pieces, and the rest. */
typedef struct {
    int64_t owned, lead, middle, trail; /* lengths, in order */
    uint32_t unit;
} runs;

static int cut(const fairfold_layout *layout, int64_t start, int64_t length, int64_t size, runs *r) {
    int status = fairfold_check_layout(layout);
    if (status != FAIRFOLD_OK) return status;
    if (start < 0 || length < 0 || start > layout->full_size || length > layout->full_size - start)
        return FAIRFOLD_BAD_ARGUMENT;
    if (size != layout->head + layout->tail) return FAIRFOLD_BAD_ARGUMENT;
    if (layout->tail > (int64_t)UINT32_MAX) return FAIRFOLD_UNSUPPORTED; /* the two ends count single coordinates */
    r->unit = fairfold_run_unit(layout);
    int64_t owned = layout->head - start;
    r->owned = owned < 0 ? 0 : owned < length ? owned : length;
    int64_t rest = length - r->owned, past = (start + r->owned) % r->unit;
    int64_t lead = past ? r->unit - past : 0;
    r->lead = lead < rest ? lead : rest;
    r->trail = (rest - r->lead) % r->unit;
    r->middle = rest - r->lead - r->trail;
    return FAIRFOLD_OK;
}

/* One of the three hashed runs of a range, on `threads`. */
static void run(const fairfold_layout *layout, uint32_t unit, int64_t start, int64_t length, fairfold_job *parts_of_job,
                fairfold_part function, int64_t threads) {
    if (length == 0) return;
    fairfold_job job;
    fairfold_plan_run(layout, unit, start, length, &job); /* cannot fail after cut() */
    job.source = parts_of_job->source;
    job.target = parts_of_job->target;
    job.counts = parts_of_job->counts;
    job.counts_each = parts_of_job->counts_each;
    fairfold_parallel(fairfold_parts(threads, length), function, &job);
}

int fairfold_recover_range(const fairfold_layout *layout, int real, const void *compact, int64_t size, int64_t start,
                           int64_t length, void *out, int threads) {
    runs r;
    int status = cut(layout, start, length, size, &r);
    if (status != FAIRFOLD_OK || length == 0) return status;
    if (real_index(real) < 0 || !compact || !out) return FAIRFOLD_BAD_ARGUMENT;
    const fairfold_part gather = fairfold_active_body()->gather[real_index(real)];
    char *to = out;
    if (r.owned) memcpy(to, (const char *)compact + start * real, (size_t)(r.owned * real));
    start += r.owned, to += r.owned * real;
    fairfold_job job = {.source = compact, .target = to};
    run(layout, 1, start, r.lead, &job, gather, 1);
    start += r.lead, job.target = to += r.lead * real;
    run(layout, r.unit, start, r.middle, &job, gather, threads);
    start += r.middle, job.target = to += r.middle * real;
    run(layout, 1, start, r.trail, &job, gather, 1);
    return FAIRFOLD_OK;
}

static void add_owned(int real, const void *values, int64_t length, void *sums) {
    if (real == 4)
        for (int64_t i = 0; i < length; i++) ((float *)sums)[i] += ((const float *)values)[i];
    else
        for (int64_t i = 0; i < length; i++) ((double *)sums)[i] += ((const double *)values)[i];
}

/* Accumulate (values given), count (values NULL), or both. */
static int accumulate(const fairfold_layout *layout, int real, const char *values, int64_t start, int64_t length,
                      void *sums, int32_t *counts, int64_t size, int threads) {
    runs r;
    int status = cut(layout, start, length, size, &r);
    if (status != FAIRFOLD_OK || length == 0) return status;
    const fairfold_body *body = fairfold_active_body();
    const fairfold_part function = values ? body->scatter[real_index(real)] : body->count;
    uint32_t *tail_counts = counts ? (uint32_t *)counts + layout->head : NULL;
    /* A long range is counted piece by piece, in a table small enough for the cache, and spread over the slots of the
     * pieces at the end. For a short one that table would be most of the work. */
    const int64_t pieces = layout->tail / r.unit;
    uint32_t *piece_counts = NULL;
    if (counts && r.unit > 1 && r.middle >= layout->tail) {
        piece_counts = calloc((size_t)pieces, sizeof *piece_counts);
        if (!piece_counts) return FAIRFOLD_NO_MEMORY;
    }
    if (values && r.owned) add_owned(real, values, r.owned, (char *)sums + start * real);
    if (counts)
        for (int64_t i = start; i < start + r.owned; i++) ((uint32_t *)counts)[i]++;
    start += r.owned;
    if (values) values += r.owned * real;
    fairfold_job job = {.source = values, .target = sums, .counts = tail_counts};
    run(layout, 1, start, r.lead, &job, function, 1);
    start += r.lead;
    if (values) job.source = values += r.lead * real;
    job.counts = piece_counts ? piece_counts : tail_counts;
    job.counts_each = !piece_counts;
    run(layout, r.unit, start, r.middle, &job, function,
        scatter_threads(threads, (int64_t)r.unit * real, layout->tail * real));
    start += r.middle;
    if (values) job.source = values += r.middle * real;
    job.counts = tail_counts;
    run(layout, 1, start, r.trail, &job, function, 1);
    if (piece_counts) {
        for (int64_t piece = 0; piece < pieces; piece++)
            for (uint32_t k = 0; k < r.unit; k++) tail_counts[piece * r.unit + k] += piece_counts[piece];
        free(piece_counts);
    }
    return FAIRFOLD_OK;
}

int fairfold_accumulate_range(const fairfold_layout *layout, int real, const void *values, int64_t start,
                              int64_t length, void *sums, int32_t *counts, int64_t size, int threads) {
    if (real_index(real) < 0 || (length > 0 && (!values || !sums))) return FAIRFOLD_BAD_ARGUMENT;
    return accumulate(layout, real, values, start, length, sums, counts, size, threads);
}

int fairfold_count_range(const fairfold_layout *layout, int64_t start, int64_t length, int32_t *counts, int64_t size,
                         int threads) {
    if (length > 0 && !counts) return FAIRFOLD_BAD_ARGUMENT;
    return accumulate(layout, 4, NULL, start, length, NULL, counts, size, threads);
}

typedef struct {
    int real;
    void *sums; /* of the tail */
    const uint32_t *counts;
    int64_t pieces;
    int64_t unit;
} divide_job;

static void divide_part(const void *argument, int part, int parts) {
    const divide_job *job = argument;
    const int64_t start = job->pieces / parts * part;
    const int64_t stop = part + 1 == parts ? job->pieces : job->pieces / parts * (part + 1);
    for (int64_t piece = start; piece < stop; piece++) {
        const uint32_t count = job->counts[piece] > 1 ? job->counts[piece] : 1;
        if (job->real == 4)
            for (int64_t k = 0; k < job->unit; k++) ((float *)job->sums)[piece * job->unit + k] /= (float)count;
        else
            for (int64_t k = 0; k < job->unit; k++) ((double *)job->sums)[piece * job->unit + k] /= (double)count;
    }
}

/* The coordinates at the two ends of the hashed part that fill no piece: at most 62. */
typedef struct {
    int64_t coordinates[2 * FAIRFOLD_MAX_UNIT], slots[2 * FAIRFOLD_MAX_UNIT];
    double sums[2 * FAIRFOLD_MAX_UNIT];
    int8_t signs[2 * FAIRFOLD_MAX_UNIT];
    int64_t count;
} ends;

static int find_ends(const fairfold_layout *layout, const runs *r, ends *e) {
    e->count = 0;
    for (int64_t i = 0; i < r->lead; i++) e->coordinates[e->count++] = layout->head + i;
    for (int64_t i = 0; i < r->trail; i++) e->coordinates[e->count++] = layout->full_size - r->trail + i;
    return fairfold_slots_and_signs(layout, e->coordinates, e->count, e->slots, e->signs);
}

/* One count a piece serves all its slots, but for those that a coordinate of an end shares: they are divided apart. */
int fairfold_reduce(const fairfold_layout *layout, int real, const void *full, void *compact, int64_t size,
                    int threads) {
    runs r;
    ends e;
    int status = layout ? cut(layout, 0, layout->full_size, size, &r) : FAIRFOLD_BAD_ARGUMENT;
    if (status != FAIRFOLD_OK) return status;
    if (real_index(real) < 0 || (size && (!full || !compact))) return FAIRFOLD_BAD_ARGUMENT;
    const int64_t pieces = layout->tail / r.unit;
    uint32_t *counts = calloc(pieces ? (size_t)pieces : 1, sizeof *counts);
    if (!counts) return FAIRFOLD_NO_MEMORY;
    status = find_ends(layout, &r, &e);
    if (status == FAIRFOLD_OK && size) {
        const fairfold_part scatter = fairfold_active_body()->scatter[real_index(real)];
        const char *values = (const char *)full + layout->head * real;
        char *tail = (char *)compact + layout->head * real;
        memcpy(compact, full, (size_t)(layout->head * real));
        memset(tail, 0, (size_t)(layout->tail * real));
        fairfold_job job = {.source = values, .target = compact};
        run(layout, 1, layout->head, r.lead, &job, scatter, 1);
        job.source = values + r.lead * real;
        job.counts = counts;
        run(layout, r.unit, layout->head + r.lead, r.middle, &job, scatter,
            scatter_threads(threads, (int64_t)r.unit * real, layout->tail * real));
        job.source = values + (r.lead + r.middle) * real;
        job.counts = NULL;
        run(layout, 1, layout->full_size - r.trail, r.trail, &job, scatter, 1);
        for (int64_t i = 0; i < e.count; i++)
            e.sums[i] = real == 4 ? (double)((float *)compact)[e.slots[i]] : ((double *)compact)[e.slots[i]];
        const divide_job divide = {real, tail, counts, pieces, r.unit};
        fairfold_parallel(fairfold_parts(threads, layout->tail), divide_part, &divide);
        for (int64_t i = 0; i < e.count; i++) {
            uint32_t count = counts[(e.slots[i] - layout->head) / r.unit];
            for (int64_t j = 0; j < e.count; j++) count += e.slots[j] == e.slots[i];
            if (real == 4)
                ((float *)compact)[e.slots[i]] = (float)e.sums[i] / (float)count;
            else
                ((double *)compact)[e.slots[i]] = e.sums[i] / (double)count;
        }
    }
    free(counts);
    return status;
}
