/* A symmetric matrix from the pairs of its triangle that occur, the columns that are strongest in every row, and the
 * blocks of the matrix around every row.
 *
 * Each goes through the matrix once. A row's numbers stand in the order of their columns, so those beyond the diagonal
 * follow as later columns come. The strongest of a row are a heap, the weakest of them on top. For blocks a row is
 * spread out, and all blocks that it is in copy from there.
 */
#include <stdlib.h>
#include <string.h>

#include "plan.h"

static double number_at(const void *values, int real, int64_t place) {
    return real == 4 ? (double)((const float *)values)[place] : ((const double *)values)[place];
}

static void set_number(void *values, int real, int64_t place, double value) {
    if (real == 4) ((float *)values)[place] = (float)value;
    else ((double *)values)[place] = value;
}

static int64_t column_at(const void *columns, int64_t bytes, int64_t place) {
    return bytes == 4 ? ((const int32_t *)columns)[place] : ((const int64_t *)columns)[place];
}

static void set_column(void *columns, int64_t bytes, int64_t place, int64_t column) {
    if (bytes == 4) ((int32_t *)columns)[place] = (int32_t)column;
    else ((int64_t *)columns)[place] = column;
}

int fairfold_symmetric_rows(const int64_t *places, int real, const void *values, int64_t count, int64_t rows,
                            int64_t *starts, int64_t column_bytes, void *columns, int number_real, void *numbers,
                            int64_t room, double *diagonal, int64_t *found) {
    if (count < 0 || rows < 0 || (real != 4 && real != 8) || (number_real != 4 && number_real != 8))
        return FAIRFOLD_BAD_ARGUMENT;
    if (rows > INT32_MAX || (column_bytes != 4 && column_bytes != 8)) return FAIRFOLD_UNSUPPORTED;
    if (!found || room / 2 < count || (rows && (!starts || !diagonal))) return FAIRFOLD_BAD_ARGUMENT;
    if (count && (!places || !values || !columns || !numbers)) return FAIRFOLD_BAD_ARGUMENT;
    if (count && (places[0] < 0 || places[count - 1] >= rows * (rows + 1) / 2)) return FAIRFOLD_BAD_ROW;
    for (int64_t k = 1; k < count; k++)
        if (places[k] <= places[k - 1]) return FAIRFOLD_BAD_ROW;
    int64_t *filled = calloc((size_t)rows + 1, sizeof *filled), total = 0;
    if (!filled) return FAIRFOLD_NO_MEMORY;
    for (int64_t k = 0, j = 0, first = 0; k < count; k++) {
        for (; places[k] - first > j; j++) first += j + 1;
        filled[j]++;
        if (places[k] - first < j) filled[places[k] - first]++;
    }
    for (int64_t j = 0; j < rows; j++) {
        starts[j] = total, total += filled[j];
        filled[j] = starts[j], diagonal[j] = 0;
    }
    for (int64_t k = 0, j = 0, first = 0; k < count; k++) {
        for (; places[k] - first > j; j++) first += j + 1;
        const int64_t i = places[k] - first;
        const double value = number_at(values, real, k);
        set_column(columns, column_bytes, filled[j], i);
        set_number(numbers, number_real, filled[j]++, value);
        if (i == j) {
            diagonal[j] = value;
            continue;
        }
        set_column(columns, column_bytes, filled[i], j);
        set_number(numbers, number_real, filled[i]++, value);
    }
    free(filled);
    *found = total;
    return FAIRFOLD_OK;
}

/* Whether rows of a matrix start in order, within it. */
static int rows_in_order(const int64_t *starts, int64_t rows, int64_t count) {
    for (int64_t r = 0; r < rows; r++)
        if (starts[r] < 0 || starts[r] > (r + 1 < rows ? starts[r + 1] : count)) return 0;
    return 1;
}

static int columns_within(const void *columns, int64_t bytes, int64_t count, int64_t rows) {
    for (int64_t k = 0; k < count; k++) {
        const int64_t column = column_at(columns, bytes, k);
        if (column < 0 || column >= rows) return 0;
    }
    return 1;
}

typedef struct {
    const int64_t *starts;
    const void *columns, *values, *roots, *users;
    int64_t *found;
    void *strengths;
    int64_t column_bytes, count, rows, most;
} strongest_job;

/* With `users`, strengths are Jaccard's of estimated numbers of users. Of equal ones the first column is the stronger. */
#define STRONGEST(name, real_t)                                                                                        \
    static void name##_sink(real_t *strength, int64_t *column, int64_t from, int64_t size) {                           \
        const real_t mine = strength[from];                                                                            \
        const int64_t own = column[from];                                                                              \
        for (int64_t next; (next = 2 * from + 1) < size; from = next) {                                                \
            if (next + 1 < size && (strength[next + 1] < strength[next] ||                                             \
                                    (strength[next + 1] == strength[next] && column[next + 1] > column[next])))        \
                next++;                                                                                                \
            if (mine < strength[next] || (mine == strength[next] && own > column[next])) break;                        \
            strength[from] = strength[next], column[from] = column[next];                                              \
        }                                                                                                              \
        strength[from] = mine, column[from] = own;                                                                     \
    }                                                                                                                  \
    static void name(const void *given, int part, int parts) {                                                         \
        const strongest_job *job = given;                                                                              \
        const real_t *values = job->values, *roots = job->roots, *users = job->users;                                  \
        for (int64_t r = 0; r < job->rows; r++) {                                                                      \
            if (job->starts[r] / (job->count / parts + 1) != part) continue;                                           \
            const int64_t end = r + 1 < job->rows ? job->starts[r + 1] : job->count;                                   \
            int64_t *column = job->found + r * job->most, size = 0;                                                    \
            real_t *strength = (real_t *)job->strengths + r * job->most;                                               \
            for (int64_t k = job->starts[r]; k < end; k++) {                                                           \
                const int64_t c = column_at(job->columns, job->column_bytes, k);                                       \
                real_t one = values[k] * roots[r] * roots[c];                                                          \
                if (users) {                                                                                           \
                    const real_t either = users[r] + users[c] - one, least = (real_t)1e-12;                            \
                    one /= either > least ? either : least;                                                            \
                }                                                                                                      \
                if (c == r || !(one > 0) || (size == job->most && !(one > strength[0]))) continue;                     \
                if (size < job->most) {                                                                                \
                    strength[size] = one, column[size++] = c;                                                          \
                    for (int64_t h = size / 2; size == job->most && h > 0; h--) name##_sink(strength, column, h - 1, size); \
                } else {                                                                                               \
                    strength[0] = one, column[0] = c;                                                                  \
                    name##_sink(strength, column, 0, size);                                                            \
                }                                                                                                      \
            }                                                                                                          \
            for (int64_t h = size / 2; size < job->most && h > 0; h--) name##_sink(strength, column, h - 1, size);     \
            for (int64_t last = size - 1; last > 0; last--) { /* the weakest goes behind the others */                 \
                const real_t weakest = strength[0];                                                                    \
                const int64_t its = column[0];                                                                         \
                strength[0] = strength[last], column[0] = column[last];                                                \
                name##_sink(strength, column, 0, last);                                                                \
                strength[last] = weakest, column[last] = its;                                                          \
            }                                                                                                          \
            for (; size < job->most; size++) strength[size] = 0, column[size] = r;                                     \
        }                                                                                                              \
    }
STRONGEST(strongest_floats, float)
STRONGEST(strongest_doubles, double)

int fairfold_strongest(const int64_t *starts, int64_t column_bytes, const void *columns, int real, const void *values,
                       int64_t count, int64_t rows, const void *roots, const void *users, int64_t most, int64_t *found,
                       void *strengths, int64_t room, int threads) {
    if (count < 0 || rows < 0 || most < 0 || (real != 4 && real != 8)) return FAIRFOLD_BAD_ARGUMENT;
    if (rows > INT32_MAX || most > INT32_MAX || (column_bytes != 4 && column_bytes != 8)) return FAIRFOLD_UNSUPPORTED;
    if (room != rows * most || (rows && (!starts || !roots)) || (count && (!columns || !values)))
        return FAIRFOLD_BAD_ARGUMENT;
    if (!room) return FAIRFOLD_OK;
    if (!found || !strengths || !rows_in_order(starts, rows, count)) return FAIRFOLD_BAD_ARGUMENT;
    if (!columns_within(columns, column_bytes, count, rows)) return FAIRFOLD_BAD_ROW;
    for (int64_t r = 0; r < rows; r++) /* of equal ones the first is the stronger */
        for (int64_t k = starts[r] + 1; k < (r + 1 < rows ? starts[r + 1] : count); k++)
            if (column_at(columns, column_bytes, k) <= column_at(columns, column_bytes, k - 1)) return FAIRFOLD_BAD_ROW;
    const strongest_job job = {starts, columns, values, roots, users, found, strengths, column_bytes, count, rows, most};
    fairfold_parallel(fairfold_parts(threads, count), real == 4 ? strongest_floats : strongest_doubles, &job);
    return FAIRFOLD_OK;
}

typedef struct {
    const int64_t *starts, *members, *first, *order;
    const void *columns, *values;
    void *blocks, *spread; /* a row for every part */
    int64_t column_bytes, count, rows, width;
    int real;
} blocks_job;

static void copy_blocks(const void *given, int part, int parts) {
    const blocks_job *job = given;
    const int64_t wanted = job->rows * job->width, width = job->width;
    const size_t real = (size_t)job->real;
    char *spread = (char *)job->spread + (size_t)part * (size_t)job->rows * real;
    memset(spread, 0, (size_t)job->rows * real);
    for (int64_t r = 0; r < job->rows; r++) {
        const int64_t begin = job->first[r], stop = job->first[r + 1];
        if (begin == stop || begin / (wanted / parts + 1) != part) continue;
        const int64_t end = r + 1 < job->rows ? job->starts[r + 1] : job->count;
        for (int64_t k = job->starts[r]; k < end; k++)
            set_number(spread, job->real, column_at(job->columns, job->column_bytes, k), number_at(job->values, job->real, k));
        for (int64_t at = begin; at < stop; at++) {
            const int64_t *mine = job->members + job->order[at] / width * width;
            const int64_t target = job->order[at] * width;
            if (job->real == 4)
                for (int64_t b = 0; b < width; b++) ((float *)job->blocks)[target + b] = ((float *)spread)[mine[b]];
            else
                for (int64_t b = 0; b < width; b++) ((double *)job->blocks)[target + b] = ((double *)spread)[mine[b]];
        }
        for (int64_t k = job->starts[r]; k < end; k++)
            set_number(spread, job->real, column_at(job->columns, job->column_bytes, k), 0);
    }
}

int fairfold_member_blocks(const int64_t *starts, int64_t column_bytes, const void *columns, int real,
                           const void *values, int64_t count, int64_t rows, const int64_t *members, int64_t width,
                           void *blocks, int64_t room, int threads) {
    if (count < 0 || rows < 0 || width < 0 || (real != 4 && real != 8)) return FAIRFOLD_BAD_ARGUMENT;
    if (rows > INT32_MAX || width > INT32_MAX || (column_bytes != 4 && column_bytes != 8)) return FAIRFOLD_UNSUPPORTED;
    if (width ? room % width || room / width != rows * width : room) return FAIRFOLD_BAD_ARGUMENT;
    if ((rows && !starts) || (room && (!members || !blocks)) || (count && (!columns || !values)))
        return FAIRFOLD_BAD_ARGUMENT;
    if (!rows_in_order(starts, rows, count)) return FAIRFOLD_BAD_ARGUMENT;
    if (!columns_within(columns, column_bytes, count, rows)) return FAIRFOLD_BAD_ROW;
    for (int64_t at = 0; at < rows * width; at++)
        if (members[at] < 0 || members[at] >= rows) return FAIRFOLD_BAD_ROW;
    if (!room) return FAIRFOLD_OK;
    const int parts = fairfold_parts(threads, count + room);
    int64_t *first = calloc((size_t)rows + 2, sizeof *first), *order = malloc((size_t)(rows * width) * sizeof *order);
    void *spread = malloc((size_t)parts * (size_t)rows * (size_t)real);
    const int status = first && order && spread ? FAIRFOLD_OK : FAIRFOLD_NO_MEMORY;
    if (status == FAIRFOLD_OK) {
        for (int64_t at = 0; at < rows * width; at++) first[members[at] + 2]++;
        for (int64_t r = 0; r < rows; r++) first[r + 2] += first[r + 1];
        for (int64_t at = 0; at < rows * width; at++) order[first[members[at] + 1]++] = at;
        const blocks_job job = {starts, members, first, order, columns, values, blocks, spread, column_bytes, count, rows, width, real};
        fairfold_parallel(parts, copy_blocks, &job);
    }
    free(first), free(order), free(spread);
    return status;
}
