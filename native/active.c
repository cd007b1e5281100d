/* Numbers at chosen positions of a vector, each with a sign: read, and added to. */
#include "plan.h"

static int within(const int32_t *positions, int64_t count, int64_t size) {
    int bad = 0;
    for (int64_t i = 0; i < count; i++) bad |= positions[i] < 0 || positions[i] >= size;
    return !bad;
}

static int check_positions(int real, const void *a, const void *b, const int32_t *positions, const int8_t *signs,
                           int64_t count, int64_t size) {
    if ((real != 4 && real != 8) || count < 0 || size < 0) return FAIRFOLD_BAD_ARGUMENT;
    if (count && (!a || !b || !positions || !signs)) return FAIRFOLD_BAD_ARGUMENT;
    return within(positions, count, size) ? FAIRFOLD_OK : FAIRFOLD_BAD_ARGUMENT;
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
