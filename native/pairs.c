/* Sums of pairs of items that occur together, in a packed triangle: the pair (i, j), i <= j, stands at j(j + 1)/2 + i.
 *
 * Histories are turned round first: every column j has the list of the histories that item j is in. Then a column is
 * summed up at a time, in double precision, in a buffer that stays in the nearest caches, and added to its place once.
 * Threads take columns of about equal work; a column's sum comes about in one order, so bits do not depend on them.
 */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

#ifndef PAIRS_AT_ONCE
#define PAIRS_AT_ONCE ((int64_t)1 << 22) /* items of histories that are turned round together */
#endif

typedef struct {
    uint32_t first, count, history; /* the items up to j of a history that has j */
} occurrence;

typedef struct {
    const int32_t *items;
    const occurrence *found;
    const int64_t *starts; /* of each column's occurrences */
    const int64_t *work;   /* before each column */
    const void *weights;
    void *total;
    double *buffers; /* one a part */
    int64_t columns;
    int real;
} pairs_job;

static double weight_at(const void *weights, int real, int64_t place) {
    return real == 4 ? (double)((const float *)weights)[place] : ((const double *)weights)[place];
}

static int64_t column_of_part(const pairs_job *job, int part, int parts) {
    const int64_t wanted = job->work[job->columns] / parts * part;
    int64_t low = 0, high = job->columns;
    if (part == parts) return job->columns;
    while (low < high) { /* the first column with at least so much before it */
        int64_t middle = (low + high) / 2;
        if (job->work[middle] < wanted) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void sum_columns(const void *given, int part, int parts) {
    const pairs_job *job = given;
    double *buffer = job->buffers + part * job->columns;
    const int64_t stop = column_of_part(job, part + 1, parts);
    for (int64_t j = column_of_part(job, part, parts); j < stop; j++) {
        if (job->starts[j] == job->starts[j + 1]) continue;
        memset(buffer, 0, (size_t)(j + 1) * sizeof *buffer);
        for (int64_t at = job->starts[j]; at < job->starts[j + 1]; at++) {
            const occurrence one = job->found[at];
            const double weight = weight_at(job->weights, job->real, one.history);
            const int32_t *items = job->items + one.first;
            for (uint32_t k = 0; k < one.count; k++) buffer[items[k]] += weight;
        }
        const int64_t first = j * (j + 1) / 2;
        if (job->real == 4)
            for (int64_t i = 0; i <= j; i++) ((float *)job->total)[first + i] += (float)buffer[i];
        else
            for (int64_t i = 0; i <= j; i++) ((double *)job->total)[first + i] += buffer[i];
    }
}

/* Items below `columns`, of a history that ascends from a number that is not below 0; -1 of another one. */
static int64_t leading_items(const int64_t *items, int64_t begin, int64_t end, int64_t columns) {
    int64_t before = -1, found = 0;
    for (int64_t at = begin; at < end; before = items[at++]) {
        if (items[at] <= before) return -1;
        found += items[at] < columns;
    }
    return found;
}

int fairfold_pair_sums(const int64_t *items, int64_t size, const int64_t *begins, const int64_t *ends,
                       int64_t histories, int real, const void *weights, int64_t columns, void *total, int64_t room,
                       int threads) {
    if (size < 0 || histories < 0 || columns < 0 || (real != 4 && real != 8)) return FAIRFOLD_BAD_ARGUMENT;
    if (columns > INT32_MAX || histories > INT32_MAX) return FAIRFOLD_UNSUPPORTED;
    if (room != columns * (columns + 1) / 2 || (room && !total) || (size && !items)) return FAIRFOLD_BAD_ARGUMENT;
    if (histories && (!begins || !ends || !weights)) return FAIRFOLD_BAD_ARGUMENT;
    int64_t entries = 0, most = 0;
    for (int64_t u = 0; u < histories; u++) {
        if (begins[u] < 0 || ends[u] < begins[u] || ends[u] > size) return FAIRFOLD_BAD_ARGUMENT;
        const int64_t mine = leading_items(items, begins[u], ends[u], columns);
        if (mine < 0) return FAIRFOLD_BAD_ROW;
        entries += mine;
        if (mine > most) most = mine;
    }
    if (!entries) return FAIRFOLD_OK;
    const int64_t at_once = entries < PAIRS_AT_ONCE + most ? entries : PAIRS_AT_ONCE + most;
    const int most_parts = fairfold_parts(threads, INT64_MAX);
    int32_t *numbers = malloc((size_t)at_once * sizeof *numbers);
    occurrence *found = malloc((size_t)at_once * sizeof *found);
    int64_t *starts = malloc((size_t)(columns + 1) * sizeof *starts), *work = malloc((size_t)(columns + 1) * sizeof *work);
    double *buffers = malloc((size_t)most_parts * (size_t)columns * sizeof *buffers);
    int status = numbers && found && starts && work && buffers ? FAIRFOLD_OK : FAIRFOLD_NO_MEMORY;
    for (int64_t from = 0; status == FAIRFOLD_OK && from < histories;) {
        memset(starts, 0, (size_t)(columns + 1) * sizeof *starts);
        memset(work, 0, (size_t)(columns + 1) * sizeof *work);
        int64_t to = from, filled = 0;
        for (; to < histories && filled < PAIRS_AT_ONCE; to++)
            for (int64_t at = begins[to], first = filled; at < ends[to] && items[at] < columns; at++) {
                numbers[filled++] = (int32_t)items[at];
                starts[items[at]]++;
                work[items[at]] += filled - first;
            }
        for (int64_t j = 0, place = 0, before = 0; j <= columns; j++) {
            const int64_t here = starts[j], cost = work[j] + (here > 0) * j;
            starts[j] = place, work[j] = before;
            place += here, before += cost;
        }
        for (int64_t u = from, at = 0; u < to; u++) {
            const int64_t first = at;
            for (int64_t k = begins[u]; k < ends[u] && items[k] < columns; k++, at++)
                found[starts[numbers[at]]++] = (occurrence){(uint32_t)first, (uint32_t)(at - first + 1), (uint32_t)u};
        }
        memmove(starts + 1, starts, (size_t)columns * sizeof *starts); /* each stands at the end of its own by now */
        starts[0] = 0;
        const pairs_job job = {numbers, found, starts, work, weights, total, buffers, columns, real};
        fairfold_parallel(fairfold_parts(threads, work[columns]), sum_columns, &job);
        from = to;
    }
    free(numbers), free(found), free(starts), free(work), free(buffers);
    return status;
}
