/* Sums of pairs of items that occur together, in a packed triangle: the pair (i, j), i <= j, stands at j(j + 1)/2 + i.
 * Of a long triangle the pairs that occur are listed.
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

/* Checks histories, and counts their leading items, those of the longest one, and the pairs of all. */
static int check_histories(const int64_t *items, int64_t size, const int64_t *begins, const int64_t *ends,
                           int64_t histories, int real, const void *weights, int64_t columns, int64_t *entries,
                           int64_t *most, int64_t *pairs) {
    if (size < 0 || histories < 0 || columns < 0 || (real != 4 && real != 8)) return FAIRFOLD_BAD_ARGUMENT;
    if (columns > INT32_MAX || histories > INT32_MAX) return FAIRFOLD_UNSUPPORTED;
    if ((size && !items) || (histories && (!begins || !ends || !weights))) return FAIRFOLD_BAD_ARGUMENT;
    *entries = *most = *pairs = 0;
    for (int64_t u = 0; u < histories; u++) {
        if (begins[u] < 0 || ends[u] < begins[u] || ends[u] > size) return FAIRFOLD_BAD_ARGUMENT;
        const int64_t mine = leading_items(items, begins[u], ends[u], columns);
        if (mine < 0) return FAIRFOLD_BAD_ROW;
        if (mine > *most) *most = mine;
        *entries += mine, *pairs += mine * (mine + 1) / 2;
    }
    return FAIRFOLD_OK;
}

/* Histories turned round: `room` items at most, and one history more. */
typedef struct {
    int32_t *numbers;
    occurrence *found;
    int64_t *starts; /* of each column's occurrences */
    int64_t *work;   /* before each column */
} turned;

static int new_turned(turned *into, int64_t entries, int64_t columns) {
    into->numbers = malloc((size_t)entries * sizeof *into->numbers);
    into->found = malloc((size_t)entries * sizeof *into->found);
    into->starts = malloc((size_t)(columns + 1) * sizeof *into->starts);
    into->work = malloc((size_t)(columns + 1) * sizeof *into->work);
    return into->numbers && into->found && into->starts && into->work;
}

static void free_turned(const turned *one) { free(one->numbers), free(one->found), free(one->starts), free(one->work); }

/* Turns histories round from one on, and returns the first that had no room. */
static int64_t turn_round(const int64_t *items, const int64_t *begins, const int64_t *ends, int64_t from,
                          int64_t histories, int64_t columns, int64_t room, const turned *into) {
    int64_t to = from, filled = 0, *starts = into->starts, *work = into->work;
    memset(starts, 0, (size_t)(columns + 1) * sizeof *starts);
    memset(work, 0, (size_t)(columns + 1) * sizeof *work);
    for (; to < histories && filled < room; to++)
        for (int64_t at = begins[to], first = filled; at < ends[to] && items[at] < columns; at++) {
            into->numbers[filled++] = (int32_t)items[at];
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
            into->found[starts[into->numbers[at]]++] = (occurrence){(uint32_t)first, (uint32_t)(at - first + 1), (uint32_t)u};
    }
    memmove(starts + 1, starts, (size_t)columns * sizeof *starts); /* each stands at the end of its own by now */
    starts[0] = 0;
    return to;
}

int fairfold_pair_sums(const int64_t *items, int64_t size, const int64_t *begins, const int64_t *ends,
                       int64_t histories, int real, const void *weights, int64_t columns, void *total, int64_t room,
                       int threads) {
    int64_t entries, most, pairs;
    int status = check_histories(items, size, begins, ends, histories, real, weights, columns, &entries, &most, &pairs);
    if (status != FAIRFOLD_OK) return status;
    if (room != columns * (columns + 1) / 2 || (room && !total)) return FAIRFOLD_BAD_ARGUMENT;
    if (!entries) return FAIRFOLD_OK;
    const int most_parts = fairfold_parts(threads, INT64_MAX);
    turned all;
    const int enough = new_turned(&all, entries < PAIRS_AT_ONCE + most ? entries : PAIRS_AT_ONCE + most, columns);
    double *buffers = malloc((size_t)most_parts * (size_t)columns * sizeof *buffers);
    if (!enough || !buffers) status = FAIRFOLD_NO_MEMORY;
    for (int64_t from = 0; status == FAIRFOLD_OK && from < histories;) {
        from = turn_round(items, begins, ends, from, histories, columns, PAIRS_AT_ONCE, &all);
        const pairs_job job = {all.numbers, all.found, all.starts, all.work, weights, total, buffers, columns, real};
        fairfold_parallel(fairfold_parts(threads, all.work[columns]), sum_columns, &job);
    }
    free_turned(&all), free(buffers);
    return status;
}

/* Which items a column has: a bit each, and one for every 64 of these. So they are found in order without sorting. */
typedef struct {
    uint64_t *bits, *words;
} marks;

/* Adds up a column in `sums`, lists what it has, and returns where the next one begins. */
static int64_t list_column(const turned *all, int64_t j, const void *weights, int real, double *sums, marks seen,
                           int64_t *places, void *values, int64_t at) {
    for (int64_t k = all->starts[j]; k < all->starts[j + 1]; k++) {
        const occurrence one = all->found[k];
        const double weight = weight_at(weights, real, one.history);
        const int32_t *items = all->numbers + one.first;
        for (uint32_t n = 0; n < one.count; n++) {
            const int32_t i = items[n];
            const uint64_t bit = (uint64_t)1 << (i & 63), word = seen.bits[i >> 6];
            sums[i] = word & bit ? sums[i] + weight : weight;
            seen.bits[i >> 6] = word | bit;
            seen.words[i >> 12] |= (uint64_t)1 << (i >> 6 & 63);
        }
    }
    for (int64_t s = 0; s <= j >> 12; s++) {
        for (; seen.words[s]; seen.words[s] &= seen.words[s] - 1) {
            const int64_t w = s << 6 | __builtin_ctzll(seen.words[s]);
            for (; seen.bits[w]; seen.bits[w] &= seen.bits[w] - 1, at++) {
                const int64_t i = w << 6 | __builtin_ctzll(seen.bits[w]);
                places[at] = j * (j + 1) / 2 + i;
                if (real == 4) ((float *)values)[at] = (float)sums[i];
                else ((double *)values)[at] = sums[i];
            }
        }
    }
    return at;
}

int fairfold_listed_pair_sums(const int64_t *items, int64_t size, const int64_t *begins, const int64_t *ends,
                              int64_t histories, int real, const void *weights, int64_t columns, int64_t *places,
                              void *values, int64_t room, int64_t *found) {
    int64_t entries, most, pairs;
    int status = check_histories(items, size, begins, ends, histories, real, weights, columns, &entries, &most, &pairs);
    if (status != FAIRFOLD_OK) return status;
    if (entries > UINT32_MAX) return FAIRFOLD_UNSUPPORTED;
    if (!found || (places && (pairs > room || !values))) return FAIRFOLD_BAD_ARGUMENT;
    *found = places ? 0 : pairs;
    if (!places) return FAIRFOLD_OK;
    if (!entries) return FAIRFOLD_OK;
    turned all;
    const int enough = new_turned(&all, entries, columns);
    double *sums = malloc((size_t)columns * sizeof *sums);
    const marks seen = {calloc((size_t)(columns >> 6) + 1, 8), calloc((size_t)(columns >> 12) + 1, 8)};
    if (!enough || !sums || !seen.bits || !seen.words) status = FAIRFOLD_NO_MEMORY;
    if (status == FAIRFOLD_OK) {
        turn_round(items, begins, ends, 0, histories, columns, INT64_MAX, &all);
        for (int64_t j = 0; j < columns; j++)
            *found = list_column(&all, j, weights, real, sums, seen, places, values, *found);
    }
    free_turned(&all), free(sums), free(seen.bits), free(seen.words);
    return status;
}
